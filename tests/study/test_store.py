"""Results on disk: nothing is lost, nothing of others is written over."""

from __future__ import annotations

import errno
import functools
import gzip
import math
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hostile
from curvlens import CurvlensError
from curvlens.study import Record, Study, Unit, log, table
from curvlens.study.rows import HEADS, line

HEAD = HEADS[2]
DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(60), [])


def record(sigma: float = 0.1, value: float = 1 / 3, seed: int = 0) -> Record:
    return Record("fig3a", 1, {"sigma": sigma, "seed": seed}, {"norm": value}, 1.5)


def test_points_are_kept_and_found_again(tmp_path: Path) -> None:
    kept = Study(tmp_path / "results")
    assert kept.records("fig3a") == {}
    with kept.writing():
        kept.add(record(0.1))
        kept.add(record(0.2))
    found = kept.records("fig3a")
    assert [r.config["sigma"] for r in found.values()] == [0.1, 0.2]
    assert found[record(0.1).key].result == {"norm": 1 / 3}
    assert found[record(0.1).key].seconds == 1.5


def test_the_order_of_a_configuration_does_not_matter() -> None:
    assert Unit("a", 1, {"x": 1, "y": 2}).key == Unit("a", 1, {"y": 2, "x": 1}).key
    assert Unit("a", 1, {"x": {"b": 1, "a": [2]}}).key == Unit("a", 1, {"x": {"a": (2,), "b": 1}}).key
    assert len({Unit(kind, n, {"x": 1}).key for kind, n in (("a", 1), ("a", 2), ("b", 1))}) == 3


def test_the_table_is_the_same_for_the_same_numbers() -> None:
    one = {r.key: r for r in (record(0.1), record(0.2))}
    other = {r.key: Record(r.kind, r.revision, r.config, r.result, 99.0) for r in (record(0.2), record(0.1))}
    assert table(one) == table(other)
    assert "seconds" not in table(one)


@pytest.mark.parametrize("left", [1, 20, -2])
def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path, left: int) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record(0.1))
        kept.add(record(0.2))
    file = kept.file("fig3a")
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    assert len(kept.records("fig3a")) == 1
    with kept.writing():
        kept.add(record(0.2))
    assert file.read_bytes() == whole


def test_a_file_that_was_only_begun(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    kept.file("fig3a").write_bytes(b'{"curvlens res')
    assert kept.records("fig3a") == {}
    with kept.writing():
        kept.add(record())
    assert len(kept.records("fig3a")) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"garbage", "damaged in line 3"),
        (b'{"key":"x"}', "damaged in line 3"),
        (b'{"key":"0","experiment":"fig3a","revision":1,"config":{"a":1},"result":{},"check":""}', "key does not"),
        (line(record(0.2)).replace("0.3333", "0.4333").strip().encode(), "numbers were changed"),
        (b"[" * 100_000, "damaged in line 3"),
        (b"[]", "damaged in line 3"),
        (b"", "damaged in line 3"),
        (b"\xff\xfe", "damaged in line 3"),
    ],
)
def test_damage_is_told_and_left_alone(tmp_path: Path, line: bytes, said: str) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record(0.1))
    file = kept.file("fig3a")
    before = file.read_bytes() + line + b"\n"
    file.write_bytes(before)
    with pytest.raises(CurvlensError, match=said) as told:
        kept.records("fig3a")
    assert "fig3a.jsonl" in str(told.value)
    assert "--set-aside" in str(told.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("head", "said"), [(b'{"curvlens results":7}', "format 7"), (b"name,value", "no results of curvlens")]
)
def test_files_of_others_are_not_touched(tmp_path: Path, head: bytes, said: str) -> None:
    kept = Study(tmp_path)
    kept.file("fig3a").write_bytes(head + b"\n1,2\n")
    with pytest.raises(CurvlensError, match=said):
        kept.records("fig3a")
    (aside,) = kept.set_aside(["fig1", "fig3a"])
    assert aside.read_bytes() == head + b"\n1,2\n"
    assert kept.records("fig3a") == {}


def test_a_finished_run_is_handed_on_as_one_compressed_table(tmp_path: Path) -> None:
    kept, other = Study(tmp_path / "kept"), Study(tmp_path / "other")
    with kept.writing():
        for sigma in (0.1, 0.2):
            kept.add(record(sigma))
    other.folder.mkdir()
    packed = other.folder / "table.jsonl.gz"
    packed.write_bytes(gzip.compress(table(kept.records("fig3a")).encode()))
    assert other.records("fig3a") == kept.records("fig3a")
    with other.writing():
        other.add(record(0.3))
    assert len(other.records("fig3a")) == 3
    old, new = (set(table(each.records("fig3a")).splitlines()) for each in (kept, other))
    assert old < new


@pytest.mark.parametrize("damage", ["cut", "garbage", "line"])
def test_a_damaged_compressed_table_is_told_and_moved_away(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b'{"key":"0"}\n' if damage == "line" else table({"": record()}).encode())
    content = {"cut": whole[:-9], "garbage": b"no gzip", "line": whole}[damage]
    (tmp_path / "table.jsonl.gz").write_bytes(content)
    with pytest.raises(CurvlensError, match=r"table\.jsonl\.gz.*--set-aside"):
        Study(tmp_path).records("fig3a")
    (aside,) = Study(tmp_path).set_aside(["fig3a"])
    assert aside.read_bytes() == content
    assert Study(tmp_path).records("fig3a") == {}


def test_points_of_another_experiment_are_damage(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record())
    kept.file("fig3a").rename(kept.file("fig1"))
    with pytest.raises(CurvlensError, match="belongs to 'fig3a'"):
        kept.records("fig1")


def test_no_space_left_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record(0.1))
        before = kept.file("fig3a").read_bytes()

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CurvlensError, match="no space is left"):
            kept.add(record(0.2))
    assert kept.file("fig3a").read_bytes() == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    one, other = Study(tmp_path), Study(tmp_path)
    with one.writing(), pytest.raises(CurvlensError, match="Another Study of this process"), other.writing():
        pass


def test_the_order_of_a_result_does_not_matter(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.add(Record("a", 1, {}, {"x": 1, "y": {"p": 2, "q": 3}}))
    study.add(Record("a", 1, {}, {"y": {"q": 3, "p": 2}, "x": 1}))
    with pytest.raises(CurvlensError, match="another result"):
        study.add(Record("a", 1, {}, {"x": 2, "y": {"p": 2, "q": 3}}))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, None, "1"])
def test_times_are_finite_numbers(seconds: Any) -> None:
    with pytest.raises(CurvlensError, match="expected a finite number"):
        Record("a", 1, {}, {}, seconds)


def test_what_a_killed_process_left_in_the_folder_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".curvlens-{'0' * 16}.new"
    left.write_bytes(b"half")
    Study(tmp_path).add(record())
    assert not left.exists()


def test_threads_share_a_study(tmp_path: Path) -> None:
    study = Study(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: study.add(record(seed=seed)), range(40)))
    assert len(study.records("fig3a")) == 40
    assert len(study.file("fig3a").read_bytes().splitlines()) == 41


def test_a_copy_of_a_study_opens_it_anew(tmp_path: Path) -> None:
    study = Study(tmp_path, identity={"of": "copies"})
    study.add(record(0.1))
    with study.writing():
        again = pickle.loads(pickle.dumps(study))
    assert again.records("fig3a") == study.records("fig3a")
    again.add(record(0.2))


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CurvlensError, match="cannot hold results"), Study(tmp_path / "file").writing():
        pass


@pytest.mark.parametrize("content", [b"my notes", b"\x00\xff", b'{"curvlens results":3}', b'{"curvlens results":1}x'])
def test_a_line_of_others_without_an_end_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    kept = Study(tmp_path)
    kept.file("fig3a").write_bytes(content)
    with pytest.raises(CurvlensError, match="--set-aside"):
        kept.records("fig3a")
    with pytest.raises(CurvlensError, match="--set-aside"):
        kept.add(record())
    assert kept.file("fig3a").read_bytes() == content


def test_a_last_line_without_its_end_is_a_point(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record(0.1))
        kept.add(record(0.2))
    whole = kept.file("fig3a").read_bytes()
    kept.file("fig3a").write_bytes(whole[:-1])
    assert len(kept.records("fig3a")) == 2
    with kept.writing():
        kept.add(record(0.3))
    assert kept.file("fig3a").read_bytes().startswith(whole)
    assert len(kept.records("fig3a")) == 3


def test_what_follows_the_last_line_and_is_no_point_is_damage(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    content = HEAD.encode() + b"a remark"
    kept.file("fig3a").write_bytes(content)
    with pytest.raises(CurvlensError, match="damaged in line 2"):
        kept.add(record())
    assert kept.file("fig3a").read_bytes() == content


def test_a_file_that_was_moved_away_meanwhile_begins_anew(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        kept.add(record(0.1))
        kept.file("fig3a").rename(tmp_path / "elsewhere")
        kept.add(record(0.2))
    assert [r.config["sigma"] for r in kept.records("fig3a").values()] == [0.2]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(CurvlensError, match="cannot hold results"), Study(tmp_path / "results").writing():
        pass
    assert (tmp_path / "target").read_text() == "precious"


def test_points_that_can_be_read_are_kept_when_a_file_is_moved_away(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        for sigma in (0.1, 0.2, 0.3):
            kept.add(record(sigma))
    file = kept.file("fig3a")
    lines = file.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"0.2", b"0.4")  # its key is that of another configuration
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(CurvlensError, match="line 3"):
        kept.records("fig3a")
    (aside,) = kept.set_aside(["fig3a"])
    assert aside.read_bytes() == b"\n".join(lines)
    assert sorted(each.config["sigma"] for each in kept.records("fig3a").values()) == [0.1, 0.3]
    assert file.read_bytes() == b"\n".join([*lines[:2], *lines[3:]])


def test_a_folder_in_the_place_of_a_file_is_moved_away(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    kept.file("fig3a").mkdir(parents=True)
    (aside,) = kept.set_aside(["fig3a"])
    assert aside.is_dir()
    assert kept.records("fig3a") == {}


@pytest.mark.parametrize("seed", range(4))
def test_hostile_stores_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    for number in range(25):
        rng = random.Random(1000 * seed + number)
        store = Study(tmp_path / str(number))
        with store.writing():
            store.add(record(0.1))
            store.add(record(0.2))
        (store.folder / "table.jsonl.gz").write_bytes(gzip.compress(table(store.records("fig3a")).encode()))
        hostile.spoil(store.folder / rng.choice(["fig3a.jsonl", "table.jsonl.gz"]), rng)
        with suppress(CurvlensError):
            Study(store.folder).records("fig3a")
        with suppress(CurvlensError):
            Study(store.folder).set_aside(["fig3a"])
        assert len(Study(store.folder).records("fig3a")) <= 2


def test_a_table_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvlens.study.log.LARGEST", 1 << 20)
    (tmp_path / "table.jsonl.gz").write_bytes(gzip.compress(HEAD.encode() + bytes(4 << 20)))
    with pytest.raises(CurvlensError, match="unpacks to more than 1 MiB"):
        Study(tmp_path).records("fig3a")


def test_line_ends_of_another_system(tmp_path: Path) -> None:
    store = Study(tmp_path)
    with store.writing():
        store.add(record(0.1))
    file = store.file("fig3a")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert len(store.records("fig3a")) == 1
    with store.writing():
        store.add(record(0.2))
    assert len(store.records("fig3a")) == 2
    file.write_text('{"curvlens results":1,"by":"me"}\n')
    with pytest.raises(CurvlensError, match="a first line that curvlens did not write"):
        store.records("fig3a")


# Full disks


class Cut:
    """A file whose disk is full after so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        self._file.write(content[: self._room])
        self._file.flush()
        if len(content) > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(content)


@pytest.mark.parametrize("room", [0, 1, 8, 30])
@pytest.mark.parametrize("stuck", [False, True])
def test_a_disk_that_is_full_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, stuck: bool) -> None:
    """Also if the half line cannot be taken back: it is cut off before the next one is added."""
    kept, opened = Study(tmp_path), Path.open
    with kept.writing():
        kept.add(record(0.1))
        before = kept.file("fig3a").read_bytes()
        with monkeypatch.context() as patch:

            def cut(file: Path, *mode: Any) -> Any:
                return Cut(opened(file, *mode), room) if mode == ("ab",) else opened(file, *mode)

            def refused(*arguments: Any) -> None:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(Path, "open", cut)
            if stuck:
                patch.setattr(os, "truncate", refused)
            with pytest.raises(CurvlensError, match=r"no space is left there\. All results before are kept"):
                kept.add(record(0.2))
        assert list(kept.records("fig3a")) == [record(0.1).key]
        if not stuck:
            assert kept.file("fig3a").read_bytes() == before
        kept.add(record(0.3))
    assert list(kept.records("fig3a")) == [record(0.1).key, record(0.3).key]
    assert kept.file("fig3a").read_bytes() == before + line(record(0.3)).encode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_is_full() -> None:
    with pytest.raises(CurvlensError, match="no space is left there"):
        log.append(Path("/dev/full"), line(record()).encode())


def test_a_file_does_not_outgrow_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Study(tmp_path)
    kept.add(record(0.1))
    monkeypatch.setattr("curvlens.study.log.LARGEST", 400)
    with pytest.raises(CurvlensError, match="Store arrays as tensors"):
        kept.add(Record("fig3a", 1, {"sigma": 0.2}, {"norms": [0.5] * 100}))
    assert len(kept.records("fig3a")) == 1


# Two processes

ADDER = """
import sys, time
from curvlens import CurvlensError
from curvlens.study import Record, Study
study = Study(sys.argv[1])
for number in range(20):
    while True:
        try:
            study.add(Record("shared", 1, {"who": sys.argv[2], "number": number}, {"third": number / 3}))
            break
        except CurvlensError as error:
            if "Another process" not in str(error):
                raise
            time.sleep(0.001)
"""


def test_two_processes_do_not_write_into_each_other(tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", ADDER, str(tmp_path), who]) for who in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    found = Study(tmp_path).records("shared").values()
    assert sorted((r.config["who"], r.config["number"]) for r in found) == [(w, n) for w in "ab" for n in range(20)]


def test_another_process_that_writes_is_told(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    with kept.writing():
        told = subprocess.run(
            [sys.executable, "-c", f"from curvlens.study import Study\nwith Study({str(tmp_path)!r}).writing(): pass"],
            capture_output=True,
            text=True,
        )
        kept.add(record())
    assert told.returncode == 1
    assert "Another process is writing results" in told.stderr
    assert len(kept.records("fig3a")) == 1


# Adding


def test_the_same_again_is_nothing_and_another_result_is_an_error(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    kept.add(record(0.1))
    before = kept.file("fig3a").read_bytes()
    kept.add(record(0.1))
    with pytest.raises(CurvlensError, match=r"another result for 'fig3a'.*Record\('fig3a', 2, …\)"):
        kept.add(record(0.1, value=0.5))
    assert kept.file("fig3a").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("../up", 1, {}, {}), "is not a kind of unit"),
        (("Upper", 1, {}, {}), "is not a kind of unit"),
        (("table", 1, {}, {}), "is not a kind of unit"),
        (("", 1, {}, {}), "is not a kind of unit"),
        (("a", True, {}, {}), "revision=True"),
        (("a", 1, [], {}), "config is of type list"),
        (("a", 1, {"x": math.nan}, {}), r"config\['x'\] is nan, and needs a finite number"),
        (("a", 1, {"x": 1 << 64}, {}), "more than 64 bits"),
        (("a", 1, {1: 2}, {}), "is not a name"),
        (("a", 1, {}, {"$float": "inf"}), "does not begin with"),
        (("a", 1, {}, {"x": "\ud800"}), "UTF-8 cannot hold"),
        (("a", 1, {}, {"x": object()}), r"result\['x'\] is of type object"),
        (("a", 1, {}, {"x": DEEP}), "nested more than 50 times"),
    ],
)
def test_what_cannot_be_stored_is_told_at_once(arguments: Any, said: str) -> None:
    with pytest.raises(CurvlensError, match=said):
        Record(*arguments)
