"""What a folder belongs to."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hostile
from curvlens import CurvlensError
from curvlens.study import Record, Study

MINE = {"model": "3f2a", "data": ["a", 0.1], "noise": float("inf")}
POINT = Record("trace", 1, {"seed": 0}, {"value": 1.5})


def test_the_same_identity_opens_a_folder_again(tmp_path: Path) -> None:
    Study(tmp_path / "run", identity=MINE).add(POINT)
    again = Study(tmp_path / "run", identity=dict(reversed(MINE.items())))
    assert again.get(POINT) == POINT


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (MINE | {"model": "77"}, "model is '3f2a' there and '77' here"),
        (
            MINE | {"data": ["a", 0.1000000000000001]},
            r"data is \['a', 0.1\] there and \['a', 0.1000000000000001\] here",
        ),
        ({"model": "3f2a", "noise": float("inf")}, r"data is \['a', 0.1\] there and not given here"),
        (MINE | {"seed": 1}, "seed is not given there and 1 here"),
    ],
)
def test_another_identity_is_refused_with_what_differs(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    Study(tmp_path, identity=MINE).add(POINT)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CurvlensError, match=f"belongs to another study: {said}"):
        Study(tmp_path, identity=other)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_anybody_may_read_and_only_the_owner_writes(tmp_path: Path) -> None:
    Study(tmp_path, identity=MINE).add(POINT)
    reader = Study(tmp_path)
    assert reader.get(POINT) == POINT
    with pytest.raises(CurvlensError, match=r"identity \('model', 'data', 'noise'\).*identity=…"):
        reader.add(Record("trace", 1, {"seed": 1}, {}))


@pytest.mark.parametrize("name", ["notes.txt", "trace.jsonl", ".git", "tensors"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == ".git" else (tmp_path / name).write_text("precious")
    with pytest.raises(CurvlensError, match=f"belongs to something else: it holds '{name}' and no study.json"):
        Study(tmp_path, identity=MINE)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_folder_that_came_to_belong_to_another_meanwhile(tmp_path: Path) -> None:
    mine, other = Study(tmp_path, identity=MINE), Study(tmp_path, identity={"model": "other"})
    other.add(POINT)
    with pytest.raises(CurvlensError, match="belongs to another study"):
        mine.add(POINT)


def test_without_an_identity_a_folder_is_shared(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    Study(tmp_path).add(POINT)
    assert (tmp_path / "notes.txt").read_text() == "precious"
    with pytest.raises(CurvlensError, match="belongs to something else"):
        Study(tmp_path, identity=MINE)


@pytest.mark.parametrize("identity", [{}, [], {"model": object()}, {1: 2}, {"$float": "inf"}])
def test_what_is_no_identity(tmp_path: Path, identity: Any) -> None:
    with pytest.raises(CurvlensError, match="This identity cannot be stored"):
        Study(tmp_path, identity=identity)


@pytest.mark.parametrize("seed", range(40))
def test_hostile_identities_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Never written over."""
    Study(tmp_path, identity=MINE).add(POINT)
    file = tmp_path / "study.json"
    hostile.spoil(file, random.Random(seed))
    regular = file.is_file() and not file.is_symlink() and os.access(file, os.R_OK) and file.stat().st_size < 1 << 20
    before = file.read_bytes() if regular else None
    try:
        Study(tmp_path, identity=MINE).add(Record("trace", 1, {"seed": 1}, {}))
    except CurvlensError:
        assert len((tmp_path / "trace.jsonl").read_bytes().splitlines()) == 2
    if before is not None:
        assert file.read_bytes() == before


KILLED = """
import os, signal, sys
from curvlens.study import Study, identity
from curvlens import files
def killed(folder, mine):
    (folder / (".curvlens-" + "0" * 16 + ".new")).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
identity.pin = killed
with Study(sys.argv[1], identity={"model": 1}).writing(): pass
"""


def test_killed_before_the_identity_is_written(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")]).returncode == -signal.SIGKILL
    assert (tmp_path / "run" / ".lock").exists()
    Study(tmp_path / "run", identity=MINE).add(POINT)
    assert Study(tmp_path / "run", identity=MINE).get(POINT) == POINT
