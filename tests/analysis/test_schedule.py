"""The order of an analysis: no unit twice, and no record that counts for two."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvlens as cl
from curvlens.analysis import subject
from curvlens.analysis.plan import Imagined
from curvlens.analysis.schedule import SAMPLES, schedule
from curvlens.results.base import from_plain
from curvlens.study import Study
from subjects import problem


def test_no_unit_twice() -> None:
    asked = problem()
    of = subject.outline(asked, has_ggn=True, optimizer=None, seed=0, budget=1e9, minimal=False)
    count = Counter(step.unit.key for step in schedule(of, Imagined(of)))
    assert len(count) > 20
    assert max(count.values()) == 1


def test_every_panel_has_something_after_a_tenth_of_a_budget(tmp_path: Path) -> None:
    """Of a budget of 1,650 gradients or more: someone who stops an analysis early sees all panels."""
    content = cl.analyze(problem(), tmp_path / "run", "165 gradients").content
    assert len(content["cells"]["G"]["trace"]) == len(content["blocks"])
    assert content["spectrum"]["densities"]
    assert content["eigenvectors"][-1]["line"]
    for panel in ("profile", "depth", "attention", "noise", "descent"):
        assert content[panel], panel
    page = (tmp_path / "run" / "index.html").read_text()
    assert "Not measured in this budget" not in page


def test_the_finer_profile_knows_the_largest_eigenvalue(tmp_path: Path) -> None:
    """From the search that was done before it: the page can show which modules make it up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    small = cl.Problem(model, (torch.randn(6, 2).double(), torch.randn(6, 1).double()), cl.losses.MSE())
    analysis = cl.analyze(small, tmp_path / "run", "3000 gradients")
    profile: Any = from_plain(json.loads(analysis.content["profile"]["profile"]))
    largest = max(each["value"] for each in analysis.content["spectrum"]["eigenvalues"]["H"])
    assert profile.samples == 16
    assert float(profile.hessian.top) == pytest.approx(largest, rel=1e-6)


def test_samples_of_the_finer_traces_are_counted_once(tmp_path: Path) -> None:
    """A round that counted for two independent ones gave 95 % intervals that held 80 % of the traces."""
    content = cl.analyze(problem(), tmp_path / "run", "300 gradients").content
    rounds = Study(tmp_path / "run").records("ggn").values()
    samples = sum(record.config["samples"] for record in rounds)
    assert {cell["samples"] for cell in content["cells"]["G"]["trace"].values()} == {samples}


def test_few_samples_of_the_whole(tmp_path: Path) -> None:
    """Six samples with the degrees of freedom that they seem to have held the trace of H in 82 of 100 intervals."""
    content = cl.analyze(problem(), tmp_path / "run", "280 gradients").content
    (record,) = Study(tmp_path / "run").records("whole").values()
    assert record.config["samples"] == SAMPLES
    trace = content["whole"]["H"]["trace"]
    half = (trace["high"] - trace["low"]) / 2
    assert half / trace["stderr"] > 4.3  # Student's t with 2 degrees of freedom, not with 3


def test_what_is_left_of_a_budget_makes_the_heat_map_finer(tmp_path: Path) -> None:
    """Down to 2 %: a budget that is large beside the model is not left unused."""

    def largest(budget: str) -> dict[str, float]:
        content = cl.analyze(problem(), tmp_path / "run", budget, minimal=True).content
        found = {}
        for letter in "HG":
            cells = content["cells"][letter]["trace"].values()
            scale = max(abs(cell["value"]) for cell in cells)
            found[letter] = max((c["stderr"] or 0.0) / max(abs(c["value"]), 0.01 * scale) for c in cells)
        return found

    coarse, fine = largest("600 gradients"), largest("3000 gradients")
    assert all(fine[letter] < 0.7 * coarse[letter] for letter in "HG")
    assert all(error < 0.13 for error in fine.values())
