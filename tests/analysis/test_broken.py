"""A unit that fails, a disk that is full, another process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import curvlens as cl
from curvlens.analysis import Now, attention
from curvlens.study import Study
from subjects import problem


def test_a_unit_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: cl.Problem) -> Any:
        raise RuntimeError("no attention here")

    monkeypatch.setattr(attention, "seen", broken)
    found = cl.analyze(problem(), tmp_path / "run", "260 gradients")
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


def test_decode_that_fails_loses_no_number(tmp_path: Path) -> None:
    def broken(ids: Any) -> list[str]:
        raise RuntimeError("no such token")

    found = cl.analyze(problem(), tmp_path / "run", "250 gradients", decode=broken)
    assert found.content["failed"] == [
        {"kind": "texts", "stage": "panels", "why": "decode= raised RuntimeError: no such token"}
    ]
    assert "no such token" in found.page.read_text()


def test_progress_that_fails_is_no_failure_of_a_unit(tmp_path: Path) -> None:
    def broken(now: Now) -> None:
        if now.inside is not None:
            raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"):
        cl.analyze(problem(), tmp_path / "run", "60 gradients", minimal=True, progress=broken)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    cl.analyze(problem(), tmp_path / "run", "60 gradients", minimal=True)
    (tmp_path / "run" / "index.html").unlink()
    (tmp_path / "run" / "index.html").mkdir()
    with pytest.raises(cl.CurvlensError, match=r"page could not be written .* What was measured is stored"):
        cl.analyze(problem(), tmp_path / "run", "60 gradients", minimal=True)


def test_an_optimiser_with_a_broken_state_is_refused_at_once(tmp_path: Path) -> None:
    asked = problem()
    saved = torch.optim.Adam(asked.model.parameters()).state_dict()
    saved["param_groups"][0]["betas"] = (1.0, 0.999)
    with pytest.raises(cl.CurvlensError, match="betas"):
        cl.analyze(asked, tmp_path / "run", "60 gradients", optimizer=saved)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, 1 << 70])
def test_no_seed(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(cl.CurvlensError, match="expected a whole number from 0"):
        cl.analyze(problem(), tmp_path / "run", "60 gradients", seed=seed)
