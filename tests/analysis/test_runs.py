"""Runs that end early go on where they were, and end with the same numbers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import curvlens as cl
from curvlens.analysis import Now
from curvlens.study import Study
from subjects import numbers, problem

BUDGET = "260 gradients"
SCRIPT = """
import sys
sys.path.insert(0, {tests!r}); sys.path.insert(0, {own!r})
import torch
torch.set_num_threads(1)
import curvlens as cl
from subjects import problem
cl.analyze(problem(), {out!r}, {budget!r})
"""


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "analysis.json").read_text())
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    cl.analyze(problem(), folder, BUDGET)
    return read(folder)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_random_moments(whole: dict[str, Any], tmp_path: Path, kills: int) -> None:
    here = Path(__file__).parent
    out = tmp_path / "run"
    script = SCRIPT.format(tests=str(here.parent), own=str(here), out=str(out), budget=BUDGET)
    draws = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        # importing and training take the first seconds
        started = time.monotonic()
        while not (out / "study.json").exists() and process.poll() is None and time.monotonic() - started < 120:
            time.sleep(0.05)
        time.sleep(draws.uniform(0.05, 2.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    cl.analyze(problem(), out, BUDGET)
    assert dict(numbers(read(out))) == dict(numbers(whole))


def test_interrupts_write_the_page(whole: dict[str, Any], tmp_path: Path) -> None:
    def interrupt(now: Now) -> None:
        if now.stage == "blocks":
            raise KeyboardInterrupt

    found = cl.analyze(problem(), tmp_path / "run", BUDGET, progress=interrupt)
    assert found.content["ended"] == "interrupted"
    assert "interrupted" in (tmp_path / "run" / "index.html").read_text()
    assert len(found.content["cells"]["G"]["trace"]) == len(problem().blocks)
    cl.analyze(problem(), tmp_path / "run", BUDGET)
    assert dict(numbers(read(tmp_path / "run"))) == dict(numbers(whole))


def test_an_interrupt_within_a_unit_ends_the_analysis(whole: dict[str, Any], tmp_path: Path) -> None:
    """Estimates keep what an interrupt leaves of them. Nothing would ever finish a unit that did."""
    seen: list[Now] = []

    def interrupt(now: Now) -> None:
        if now.stage == "blocks" and now.inside is not None and now.inside[0] > 3 and not seen:
            seen.append(now)
            raise KeyboardInterrupt

    found = cl.analyze(problem(), tmp_path / "run", BUDGET, progress=interrupt)
    assert seen
    assert found.content["ended"] == "interrupted"
    for record in Study(tmp_path / "run").records("block").values():
        assert record.result["trace"][2] >= record.config["samples"]
    cl.analyze(problem(), tmp_path / "run", BUDGET)
    assert dict(numbers(read(tmp_path / "run"))) == dict(numbers(whole))


def test_terminated_writes_the_page(tmp_path: Path) -> None:
    """As a batch system ends a job: SIGTERM, some time, SIGKILL."""
    here, out = Path(__file__).parent, tmp_path / "run"
    code = tmp_path / "mine.py"
    code.write_text(
        f"import sys\nsys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\nfrom subjects import problem as made\n"
    )
    command = [sys.executable, "-m", "curvlens", "analyze", f"{code}:made", "--budget", "1h", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = time.monotonic()
    # The clock and the start are stored before the plan, when there is nothing for a page yet.
    while len(list(out.glob("*.jsonl"))) < 3 and process.poll() is None and time.monotonic() - started < 120:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert read(out)["ended"] == "interrupted"
    assert "interrupted" in (out / "index.html").read_text()


def test_a_larger_budget_refines(whole: dict[str, Any], tmp_path: Path) -> None:
    coarse = cl.analyze(problem(), tmp_path / "run", "100 gradients").content
    rows = {file.name: file.read_text() for file in (tmp_path / "run").glob("*.jsonl")}
    finer = cl.analyze(problem(), tmp_path / "run", BUDGET).content
    for name, before in rows.items():  # nothing is computed again
        assert (tmp_path / "run" / name).read_text().startswith(before)
    assert len(finer["cells"]["H"]["trace"]) > len(coarse["cells"].get("H", {}).get("trace", {}))


def test_the_model_is_left_alone(tmp_path: Path) -> None:
    asked = problem()
    before, threads = asked.theta, torch.get_num_threads()
    cl.analyze(asked, tmp_path / "run", "60 gradients", minimal=True)
    assert torch.equal(asked.theta, before)
    assert torch.get_num_threads() == threads


def test_other_problems_have_other_folders(tmp_path: Path) -> None:
    cl.analyze(problem(), tmp_path / "run", "60 gradients", minimal=True)
    with pytest.raises(cl.CurvlensError, match="belongs to another study: seed is 0 there and 1 here"):
        cl.analyze(problem(), tmp_path / "run", "60 gradients", seed=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(cl.CurvlensError, match="belongs to something else"):
        cl.analyze(problem(), tmp_path / "mine", "60 gradients")


@pytest.mark.parametrize(
    ("budget", "message"), [("3 gradients", "smallest that is useful"), ("soon", "no amount|not an amount")]
)
def test_bad_budgets(tmp_path: Path, budget: str, message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        cl.analyze(problem(), tmp_path / "run", budget)


def test_no_problem(tmp_path: Path) -> None:
    with pytest.raises(cl.CurvlensError, match=r"analyze takes a curvlens\.Problem"):
        cl.analyze(problem().model, tmp_path / "run")  # type: ignore[arg-type]


def test_the_same_model_at_other_weights_is_another(tmp_path: Path) -> None:
    """`with_params` leaves the model as it is: its own weights say nothing about where the problem is."""
    asked = problem()
    cl.analyze(asked, tmp_path / "run", "60 gradients", minimal=True)
    with pytest.raises(cl.CurvlensError, match="another study"):
        cl.analyze(asked.with_params(asked.theta * 1.05), tmp_path / "run", "60 gradients", minimal=True)
