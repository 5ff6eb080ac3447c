"""``curvlens demo`` and ``curvlens analyze``: from a command to the page."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from curvlens import CurvlensError
from curvlens.analysis import Now, instrument
from curvlens.cli import app
from curvlens.cli.adder import trained
from curvlens.cli.analyze import _Told
from curvlens.data import Addition
from curvlens.report.terminal.analysis import summary


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, " ".join(result.output.split())


def test_demo(tmp_path: Path) -> None:
    """The summary has sentences and a heat map, the page is there."""
    code, said = invoke("demo", "--out", str(tmp_path / "run"), "--budget", "150 gradients")
    assert code == 0, said
    assert "of the Gauss–Newton trace" in said
    assert "trace of G, layers 0 to 1" in said
    assert re.search(r"attn\.q( [0-9]){2} ", said)  # no colours here: the map is in digits
    assert "0 to 9: " in said
    page = (tmp_path / "run" / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    content = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert len(content["cells"]["G"]["trace"]) == 20
    assert content["sanity"]["shuffled_loss"] > content["point"]["loss"]
    in_colour = list(summary(content))
    assert any("▀▀▀▀" in line.plain for line in in_colour)
    # the same command again: nothing is measured, the numbers are the same
    code, said = invoke("demo", "--out", str(tmp_path / "run"), "--budget", "150 gradients")
    again = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert code == 0
    assert again["cells"] == content["cells"]


def test_dry_run_measures_nothing(tmp_path: Path) -> None:
    code, said = invoke("analyze", "demo", "--out", str(tmp_path / "run"), "--budget", "500 gradients", "--dry-run")
    assert code == 0, said
    assert "One gradient takes" in said
    assert "spectral density" in said
    assert not (tmp_path / "run").exists()


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    code, said = invoke("analyze", "demo", "--out", str(tmp_path / "run"), "--budget", "5 gradients")
    assert code == 1
    assert "too few for anything" in said
    assert "40 gradients" in said


def test_the_folder_of_another_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert invoke("demo", "--out", str(run), "--budget", "45 gradients")[0] == 0
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    code, said = invoke("demo", "--out", str(run), "--budget", "45 gradients", "--seed", "1")
    assert code == 1
    assert "belongs to another study" in said
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_an_optimiser(tmp_path: Path) -> None:
    """Its state is read without running anything, and its distance to the edge is on the page."""
    model = trained(Addition(digits=2), 300, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for seed in range(5):
        tokens, labels = Addition(digits=2).batch(32, seed=seed)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    words = ("--out", str(tmp_path / "run"), "--budget", "250 gradients", "--optimizer", str(tmp_path / "optimizer.pt"))
    code, said = invoke("analyze", "demo", *words)
    assert code == 0, said
    assert "of its edge of stability" in said


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"\x80\x02cos\nsystem\n(S'true'\ntR."])
def test_a_file_that_is_no_optimiser(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "optimizer.pt").write_bytes(content)
    code, said = invoke(
        "analyze", "demo", "--out", str(tmp_path / "run"), "--optimizer", str(tmp_path / "optimizer.pt")
    )
    assert code == 1
    assert "torch.save(optimizer.state_dict()" in said


def test_messages_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in a message are printed: rich took those of ``params=[names]`` away, and raised at ``[/x]``."""

    def broken(*_: object, **__: object) -> None:
        raise CurvlensError("Leave them out: params=[names that it moves] or [/x].")

    monkeypatch.setattr(instrument, "doctor", broken)
    monkeypatch.setattr(sys.modules[_Told.__module__], "EVERY", 0.0)
    code, said = invoke("demo", "--out", str(tmp_path / "[/run]"), "--budget", "60 gradients")
    assert code == 0, said
    assert "params=[names that it moves] or [/x]." in said
    assert "[/run]" in said


def test_names_in_brackets_in_the_progress() -> None:
    said = io.StringIO()
    for terminal in (False, True):
        console = Console(file=said, force_terminal=terminal, width=100)
        told = _Told(console)
        told.start()
        told(Now("blocks", "h.[/0].[bold]", 0.5, 1.0, None))
        if told._bar is not None:
            told._bar.refresh()
        told.stop()
    assert said.getvalue().count("h.[/0].[bold]") >= 2


def test_files_that_hold_no_optimiser(tmp_path: Path) -> None:
    """A pipe would block for ever; a pickle that runs code is not loaded."""
    pipe, pickled = tmp_path / "pipe", tmp_path / "evil.pt"
    os.mkfifo(pipe)
    pickled.write_bytes(pickle.dumps(Evil(), protocol=2))
    for file, why in (
        (pipe, "is no regular file"),
        (pickled, "loading pickle runs code"),
        (tmp_path / "no", "No such"),
    ):
        code, said = invoke("analyze", "demo", "--out", str(tmp_path / "run"), "--optimizer", str(file))
        assert code == 1
        assert why in said
    assert not (tmp_path / "run").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))
