"""Runs: only what is missing, in any number of processes, killed at any moment, within a budget."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlens import CurvlensError
from curvlens.papers import Effort, Experiment, Report, measured, missing, run
from curvlens.papers.first_paper import growth
from curvlens.study import Finished, Measured, Record, Study, StudyProgress, Unit, table
from curvlens.study import run as run_units
from killing import ONE_THREAD, killed_when

QUICK = Effort(quick=True)


def square(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("fails"):
        raise ValueError("no number")
    time.sleep(config.get("sleep", 0.0))
    return {"square": config["sigma"] ** 2 / 3, "threads": torch.get_num_threads()}


def toy(points: Sequence[Mapping[str, Any]], name: str = "toy", data: str | None = None) -> Experiment:
    return Experiment(name, "", "", lambda effort: points, square, lambda records: Report(), data=data)


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    first, more = [{"sigma": 1.0}, {"sigma": 2.0}], [{"sigma": 2.0}, {"sigma": 3.0}]
    assert run([toy(first)], QUICK, kept, jobs=2) == 2
    other = toy([*first, *more], "shown", data="toy")
    assert [unit.config["sigma"] for unit in missing([toy(first), other], QUICK, kept)] == [3.0]
    seen: list[StudyProgress] = []
    assert run([toy(first), other], QUICK, kept, progress=seen.append) == 1
    assert [(now.done, now.total, now.last, now.left) for now in seen] == [(1, 1, "toy", 0.0)]
    assert [r.result["square"] for r in measured(other, QUICK, kept)] == [1 / 3, 4 / 3, 4 / 3, 3.0]
    assert {r.result["threads"] for r in measured(other, QUICK, kept)} == {1}


def test_a_point_that_fails_leaves_the_others(tmp_path: Path) -> None:
    kept = Study(tmp_path)
    points = [{"sigma": 1.0}, {"sigma": 2.0, "fails": True}, {"sigma": 3.0}]
    with pytest.raises(CurvlensError, match=r"1 of 3 units failed.*no number"):
        run([toy(points)], QUICK, kept, jobs=2)
    assert len(kept.records("toy")) == 2


def test_numbers_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    tables = []
    for jobs in (1, 2):
        kept = Study(tmp_path / str(jobs))
        points = [{"width": 8, "norm": "pre", "sigma": sigma, "seed": 0, "pairs": True} for sigma in (0.01, 1.0, 10.0)]
        one = Experiment("fig3b", "", "", lambda effort, p=points: p, growth.measure, lambda records: Report())  # type: ignore[misc]
        run([one], QUICK, kept, jobs=jobs)
        tables.append(table(kept.records("fig3b")))
    assert tables[0] == tables[1]


SLOW = [{"sigma": 0.1 * i, "seed": 0, "sleep": 0.2} for i in range(1, 13)]


def child(folder: str) -> None:
    run([toy(SLOW)], QUICK, Study(folder), jobs=2)


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"from tests.study.test_run import child; child({str(tmp_path)!r})"]
    killed_when(command, tmp_path / "toy.jsonl", 5)
    kept = Study(tmp_path)
    begun = kept.records("toy")
    assert 4 <= len(begun) < len(SLOW)
    assert run([toy(SLOW)], QUICK, kept, jobs=2) == len(SLOW) - len(begun)
    whole = [Record("toy", 1, config, square(config) | {"threads": 1}) for config in SLOW]
    assert table(kept.records("toy")) == table({record.key: record for record in whole})


@pytest.mark.full
@pytest.mark.parametrize("lines", [1, 2, 17, 40])
def test_the_command_killed_at_any_moment(tmp_path: Path, lines: int) -> None:
    """And started again, against a run that was left alone: the same bytes in the table and on the page."""
    command = [sys.executable, "-m", "curvlens", "reproduce", "table1", "--quick", "--seeds", "2", "--jobs", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    subprocess.run([*command, "--results", str(whole)], check=True, capture_output=True, env=ONE_THREAD)
    killed_when([*command, "--results", str(killed)], killed / "table1.jsonl", lines)
    killed_when([*command, "--results", str(killed)], killed / "table1.jsonl", lines + 9)
    subprocess.run([*command, "--results", str(killed)], check=True, capture_output=True, env=ONE_THREAD)
    for name in ("table.jsonl", "quick-2-seeds/index.html", "quick-2-seeds/summary.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def ended(config: Any) -> dict[str, Any]:
    if config["sigma"] == 2.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": config["sigma"] ** 2}


def test_a_process_that_is_ended_from_outside_is_told(tmp_path: Path) -> None:
    points = [{"sigma": 1.0}, {"sigma": 2.0}, {"sigma": 3.0}]
    toy = Experiment("toy", "", "", lambda effort: points, ended, lambda records: Report())
    with pytest.raises(CurvlensError, match="the same command again, with --jobs 1"):
        run([toy], QUICK, Study(tmp_path), jobs=2)


PARENT = """
import os, subprocess, sys, time
if len(sys.argv) > 1:
    from curvlens.study.lifeline import end_with
    end_with(int(sys.argv[1]))
    print("ready", flush=True)
else:
    subprocess.Popen([sys.executable, "-c", sys.stdin.read(), str(os.getpid())])
time.sleep(60)
print("still here")
"""


def test_a_process_that_measures_ends_with_its_parent() -> None:
    """The pipe that both write to is closed when both are gone."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(PARENT)
        parent.stdin.close()
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""


# Units


def squares(config: Mapping[str, Any]) -> Measured:
    x = torch.full((3,), config["x"], dtype=torch.float64)
    return Measured({"threads": torch.get_num_threads()}, {"square": x * x})


def nap(config: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(config["sleep"])
    return {}


def squared(count: int) -> list[Unit]:
    return [Unit("squares", 1, {"x": float(x)}) for x in range(count)]


@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_tensors_come_back_from_any_number_of_processes(tmp_path: Path, jobs: int) -> None:
    before = torch.get_num_threads()
    study = Study(tmp_path, identity={"of": "squares"})
    assert run_units(study, squared(4), {"squares": squares}, jobs=jobs) == Finished(4, 0)
    assert torch.get_num_threads() == before
    for unit in squared(4):
        found = study.get(unit)
        assert found is not None
        assert found.result == {"threads": 1}
        assert torch.equal(found.tensors["square"], torch.full((3,), unit.config["x"] ** 2, dtype=torch.float64))
    assert run_units(study, squared(4), {"squares": squares}, jobs=jobs) == Finished(0, 0)


def test_tensors_do_not_stay_in_memory(tmp_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def keep(config: Mapping[str, Any]) -> Measured:
        found = squares(config)
        seen.append(weakref.ref(found.tensors["square"]))
        return found

    alive: list[int] = []
    run_units(
        Study(tmp_path),
        squared(5),
        {"squares": keep},
        progress=lambda _: alive.append(sum(each() is not None for each in seen)),
    )
    assert max(alive) == 1  # that of the last unit


def test_more_work_is_another_unit(tmp_path: Path) -> None:
    study = Study(tmp_path)
    few, many = Unit("squares", 1, {"x": 2.0, "samples": 8}), Unit("squares", 1, {"x": 2.0, "samples": 32})
    run_units(study, [few], {"squares": squares})
    assert study.missing([few, many, many]) == [many]
    assert study.get(many) is None


def test_a_unit_is_stored_before_the_next_begins(tmp_path: Path) -> None:
    study, seen = Study(tmp_path), []

    def look(config: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(len(Study(tmp_path).records("squares")))
        return {}

    run_units(study, squared(3), {"squares": look})
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_budget_of_gradients_does_the_same_units_everywhere(tmp_path: Path, jobs: int) -> None:
    study = Study(tmp_path)
    work = {"squares": squares}
    first = run_units(study, squared(8), work, jobs=jobs, budget="7 gradients", gradients=lambda unit: 2.0)
    assert first == Finished(3, 5)
    assert study.missing(squared(8)) == squared(8)[3:]
    rest = run_units(study, squared(8), work, jobs=jobs, budget="10 gradients", gradients=lambda unit: 2.0)
    assert rest == Finished(5, 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_budget_of_time_ends_a_run_in_time(tmp_path: Path, jobs: int) -> None:
    study = Study(tmp_path)
    units = [Unit("nap", 1, {"sleep": 0.3, "number": number}) for number in range(40)]
    start = time.monotonic()
    first = run_units(study, units, {"nap": nap}, jobs=jobs, budget=1.2)
    assert 1 <= first.done < 40
    assert first.done + first.left == 40
    assert time.monotonic() - start < 10  # with the start of processes; all units take 12 s or 6 s
    assert run_units(study, units[:2], {"nap": nap}, jobs=1, budget="0.1s").done == 0  # 0.3 s are known by now


def test_time_left_is_that_of_units_of_the_same_kind(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.add(Record("slow", 1, {"number": -1}, {}, 100.0))
    study.add(Record("slow", 1, {"number": -2}, {}, 300.0))
    study.add(Record("fast", 1, {"number": -1}, {}, 1.0))
    units = [Unit(kind, 1, {"number": n}) for kind in ("fast", "slow") for n in range(2)]
    seen: list[StudyProgress] = []
    run_units(study, units, {"slow": lambda c: {}, "fast": lambda c: {}}, progress=seen.append)
    assert seen[0].left == pytest.approx(400.5, abs=0.2)  # (1 + 0) / 2 and twice (100 + 300) / 2
    assert seen[1].left == pytest.approx(400)
    assert seen[2].left == pytest.approx(400 / 3, rel=1e-3)
    assert (seen[3].done, seen[3].total, seen[3].left) == (4, 4, 0.0)
    assert all(a.elapsed <= b.elapsed for a, b in itertools.pairwise(seen))
    assert str(seen[1]) == "2 of 4 units, last of fast, about 6.7 min left"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jobs": -1}, "jobs=-1 is not a number of processes"),
        ({"jobs": 1.5}, "jobs=1.5"),
        ({"budget": "5 gradients"}, "needs the cost of a unit"),
        ({"budget": "10 parsecs"}, "unknown unit 'parsecs'"),
        ({"work": {}}, "There is no work for units of 'squares'"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_made(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CurvlensError, match=said):
        run_units(Study(tmp_path / "new"), squared(2), **({"work": {"squares": squares}} | options))
    assert not (tmp_path / "new").exists()


def test_a_result_that_cannot_be_stored_leaves_the_others(tmp_path: Path) -> None:
    study = Study(tmp_path)

    def some(config: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": torch.ones(2) if config["x"] == 1 else 0.5}

    with pytest.raises(CurvlensError, match=r"1 of 3 units failed.*result\['x'\] is of type Tensor"):
        run_units(study, squared(3), {"squares": some})
    assert study.missing(squared(3)) == squared(3)[1:2]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [({"v": torch.ones(2).to_sparse()}, r"tensors\['v'\] is sparse"), ([1], "tensors is of type list")],
)
def test_tensors_that_cannot_be_stored_leave_the_others(tmp_path: Path, tensors: Any, said: str) -> None:
    study = Study(tmp_path)

    def some(config: Mapping[str, Any]) -> Measured:
        return Measured({"r": 1}, tensors if config["x"] == 1 else {})

    with pytest.raises(CurvlensError, match=rf"1 of 4 units failed.*squares {{'x': 1.0}}.*{said}"):
        run_units(study, squared(4), {"squares": some})
    assert study.missing(squared(4)) == squared(4)[1:2]


def test_work_may_write_into_its_configuration(tmp_path: Path) -> None:
    study, units = Study(tmp_path), [Unit("sizes", 1, {"sizes": [1, 2]})]

    def grow(config: Mapping[str, Any]) -> dict[str, Any]:
        config["sizes"].append(3)
        return {"n": len(config["sizes"])}

    assert run_units(study, units, {"sizes": grow}) == Finished(1, 0)
    assert units[0].config == {"sizes": [1, 2]}
    found = study.get(units[0])
    assert found is not None
    assert found.result == {"n": 3}


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    study = Study(tmp_path)

    def stop(config: Mapping[str, Any]) -> dict[str, Any]:
        if config["x"] == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        run_units(study, squared(5), {"squares": stop})
    assert len(study.records("squares")) == 2
    assert run_units(study, squared(5), {"squares": squares}).done == 3


# Killed


STORM = 400


def storm(folder: str) -> None:
    """Many rows and tensors as fast as they can be written."""
    study = Study(folder, identity={"of": "storm"})
    units = [Unit("squares", 1, {"x": float(x)}) for x in range(STORM)]
    run_units(study, units, {"squares": squares})


def killed_after(folder: Path, seconds: float) -> bool:
    """Kill a storm so long after its folder appeared; whether it was killed in time."""
    code = f"from tests.study.test_run import storm; storm({str(folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env=ONE_THREAD)
    while process.poll() is None and not folder.exists():
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def check_storm(folder: Path) -> None:
    study = Study(folder, identity={"of": "storm"})
    for record in study.records("squares").values():
        assert record.tensors["square"].tolist() == [record.config["x"] ** 2] * 3
    storm(str(folder))
    study = Study(folder, identity={"of": "storm"})
    found = study.records("squares")
    assert sorted(record.config["x"] for record in found.values()) == list(range(STORM))
    assert all(record.tensors["square"][0] == record.config["x"] ** 2 for record in found.values())
    assert len(study.file("squares").read_bytes().splitlines()) == STORM + 1
    assert not list(folder.glob("tensors/.*"))


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
def test_killed_while_it_writes(tmp_path: Path, seconds: float) -> None:
    killed_after(tmp_path / "storm", seconds)
    check_storm(tmp_path / "storm")


@pytest.mark.full
@pytest.mark.parametrize("number", range(40))
def test_killed_at_many_moments(tmp_path: Path, number: int) -> None:
    for seconds in (0.013 * number, 0.001 * number):
        killed_after(tmp_path / "storm", seconds)
    check_storm(tmp_path / "storm")
