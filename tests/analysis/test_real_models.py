"""Trained models, analysed within the time that a user would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import curvlens as cl
from real import reaction_bert

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:The operator is in float32")]


def close_cells(content: dict[str, Any], letter: str) -> float:
    """The share of traces with an error under 25 % of max(|cell|, 1 % of the largest cell)."""
    cells = content["cells"][letter]["trace"]
    largest = max(abs(cell["value"]) for cell in cells.values())
    close = [cell["stderr"] < 0.25 * max(abs(cell["value"]), 0.01 * largest) for cell in cells.values()]
    return float(sum(close) / len(content["blocks"]))


def test_reactions_in_ten_minutes(tmp_path: Path) -> None:
    """A BERT of 12 layers and 6.7 million parameters."""
    model, batch = reaction_bert()
    problem = cl.Problem(model.float(), batch, cl.losses.MaskedLM())
    cl.analyze(problem, tmp_path / "run", "10m", name="rxnfp")
    content = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert content["failed"] == []
    assert content["sanity"]["shuffled_loss"] > content["point"]["loss"]
    assert close_cells(content, "G") > 0.95
    assert close_cells(content, "H") > 0.6
    page = (tmp_path / "run" / "index.html").read_text()
    assert len(page.encode()) < 2 << 20
    assert "Not measured in this budget" not in page
