"""``curvlens landscape``, from the command to the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import curvlens as cl
from curvlens.cli import app
from curvlens.results import Landscape

CODE = """
import torch
from torch import nn
import curvlens as cl

def problem(count=24):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 2)).double()
    data = (torch.randn(count, 3, dtype=torch.float64), torch.randint(2, (count,)))
    return cl.Problem(model, data, cl.losses.CrossEntropy())

def few():
    return problem(5)
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return str(file)


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["landscape", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_the_sentences_and_the_files(code: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("found.json", "found.html", "found.csv")]
    options = ("--radius", "0.01", "--radius", "50", "--tolerance", "0.1", "--orders", "20", "--points", "3")
    shown = ran(f"{code}:problem", *options, "--out", str(files[0]), "--html", str(files[1]), "--csv", str(files[2]))
    found = cl.load(files[0])
    assert isinstance(found, Landscape)
    assert found.radii.tolist() == [0.01, 50.0]
    assert "Landscape of 24 samples over 20 orders" in shown
    assert "hessian distance" in shown
    assert "sample 9 changes the loss by" in shown
    assert "holds up to a distance of 0.01" in shown
    assert "For a tolerance of 0.1: from " in shown
    assert files[2].read_text().startswith("samples,increment,distance,gradient_distance,hessian_distance")
    assert "radius,model,true" in files[2].read_text()
    assert "<html" in files[1].read_text().lower()
    assert "true loss" in files[1].read_text()
    again = ran(f"{code}:problem", *options)
    assert again.splitlines()[:12] == shown.splitlines()[:12]


def test_a_full_disk(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Landscape, "plot", full)
    result = CliRunner().invoke(
        app, ["landscape", f"{code}:problem", "--losses-only", "--html", str(tmp_path / "x.html")]
    )
    assert result.exit_code == 1
    assert "could not be written: No space left on device" in " ".join(result.output.split())


def test_losses_only_and_within(code: str) -> None:
    shown = ran(f"{code}:problem", "--losses-only", "--orders", "20")
    assert "hessian" not in shown
    assert "it is 0 at a minimum" in shown
    assert "within 2.weight" in ran(f"{code}:problem", "--within", "2.weight", "--orders", "20", "--probes", "2")
    far = ran(f"{code}:problem", "--radius", "80", "--orders", "20", "--points", "3")
    assert "is not seen to hold at any of the distances" in far
    assert "too few to tell" in far


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problem", "--radius", "0.1", "--losses-only"], "--losses-only leaves out"),
        (["problem", "--within", "h.9"], "h.9"),
        (["few"], "needs 16 single samples"),
        (["problem", "--sequences", "20"], "--sequences is for Hugging Face models"),
        (["problem", "--html", "/nowhere/page.html"], "there is no folder"),
    ],
)
def test_what_cannot_be_done(code: str, arguments: list[str], message: str) -> None:
    name, *options = arguments
    result = CliRunner().invoke(app, ["landscape", f"{code}:{name}", *options])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
