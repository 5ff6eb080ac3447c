"""A unit that fails, a disk that is full, another process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import curvlens as cl
from curvlens.analysis import attention
from curvlens.study import Study
from subjects import problem


def test_a_unit_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: cl.Problem) -> Any:
        raise RuntimeError("no attention here")

    monkeypatch.setattr(attention, "seen", broken)
    found = cl.analyze(problem(), tmp_path / "run", "170 gradients")
    assert [failure["kind"] for failure in found.content["failed"]] == ["attention"]
    assert "RuntimeError: no attention here" in found.page.read_text()
    assert len(found.content["cells"]["G"]["trace"]) == len(problem().blocks)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored stays, and the same call goes on later."""
    add, count = Study.add, 0

    def full(self: Study, record: Any) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise cl.CurvlensError(f"could not be written: {errno.ENOSPC}")
        add(self, record)

    monkeypatch.setattr(Study, "add", full)
    with pytest.raises(cl.CurvlensError, match="could not be written"):
        cl.analyze(problem(), tmp_path / "run", "100 gradients", minimal=True)
    monkeypatch.setattr(Study, "add", add)
    rows = sum(len(file.read_text().splitlines()) for file in (tmp_path / "run").glob("*.jsonl"))
    assert rows >= 6
    found = cl.analyze(problem(), tmp_path / "run", "100 gradients", minimal=True)
    assert len(found.content["cells"]["G"]["trace"]) == len(problem().blocks)


def test_another_process_writes(tmp_path: Path) -> None:
    cl.analyze(problem(), tmp_path / "run", "60 gradients", minimal=True)
    from curvlens.analysis.subject import identity

    with (
        Study(tmp_path / "run", identity=identity(problem(), 0, None)).writing(),
        pytest.raises(cl.CurvlensError, match="writing"),
    ):
        cl.analyze(problem(), tmp_path / "run", "100 gradients", minimal=True)
