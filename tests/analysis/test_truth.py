"""The numbers of a page against dense derivatives that share no code with curvlens."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlens as cl
from curvlens.analysis.document import _over_blocks, _whole_estimates, _width
from curvlens.analysis.estimates import cautious, enclosed, end_of_spectrum, estimate
from curvlens.analysis.instrument import _pairs
from curvlens.analysis.known import Known
from curvlens.study import Study
from subjects import adder, batch, problem, rows
from truth import Truth


@cache
def truths() -> dict[str, Tensor]:
    truth = Truth(adder(), [batch()], rows, square=False)
    return {"H": truth.hessian, "G": truth.ggn, "F": truth.hessian - truth.ggn}


def block(matrix: Tensor, asked: cl.Problem, name: str) -> Tensor:
    places = torch.arange(asked.layout.size, dtype=torch.float64)
    own = asked.blocks.split(places)[name].long()
    return matrix[own][:, own]


def quantities(matrix: Tensor) -> dict[str, float]:
    values = torch.linalg.eigvalsh(matrix)
    found = {"trace": matrix.trace(), "norm": matrix.norm(), "top": values[-1], "bottom": values[0]}
    return {**{name: float(x) for name, x in found.items()}, "mean": float(matrix.trace()) / len(matrix)}


@cache
def analysed(seed: int) -> dict[str, Any]:
    """The page's own JSON."""
    folder = Path(tempfile.mkdtemp()) / "run"
    cl.analyze(problem(), folder, "900 gradients", seed=seed)
    content: dict[str, Any] = json.loads((folder / "analysis.json").read_text())
    return content


@pytest.mark.parametrize(("seeds", "least"), [(1, 0.88), pytest.param(5, 0.92, marks=pytest.mark.full)])
def test_intervals_hold_the_truth(seeds: int, least: float) -> None:
    """Cells of one analysis are correlated: one seed may have fewer of them right than 95 %."""
    asked = problem()
    inside = count = 0
    for seed in range(seeds):
        content = analysed(seed)
        for letter, found in content["cells"].items():
            for quantity, cells in found.items():
                for name, cell in cells.items():
                    true = quantities(block(truths()[letter], asked, name))[quantity]
                    scale = float(truths()["H"].norm())
                    if cell["exact"]:
                        assert cell["value"] == pytest.approx(true, rel=1e-8, abs=1e-10 * scale), (
                            letter,
                            quantity,
                            name,
                        )
                    elif "bound" in cell:  # some eigenvalue is within; with this tolerance it is the extreme one
                        slack = 1e-9 * scale + 0.02 * abs(true)
                        inside += cell["low"] - slack <= true <= cell["high"] + slack
                        count += 1
                    else:
                        inside += cell["low"] <= true <= cell["high"]
                        count += 1
    assert count > 60 * seeds
    assert inside / count > least, (inside, count)


def test_the_whole() -> None:
    content = analysed(0)
    H = truths()["H"]
    values = torch.linalg.eigvalsh(H)
    whole = content["whole"]["H"]
    assert whole["top"]["value"] == pytest.approx(float(values[-1]), rel=1e-2)
    assert whole["bottom"]["value"] == pytest.approx(float(values[0]), rel=5e-2)
    for name, true in (("trace", H.trace()), ("norm", H.norm())):
        assert abs(whole[name]["value"] - float(true)) < 4 * whole[name]["stderr"] + 1e-9
    asked = problem()
    assert content["point"]["loss"] == pytest.approx(asked.loss(), rel=1e-12)
    vector = content["eigenvectors"][-1]
    _, vectors = torch.linalg.eigh(H)
    mass = {name: float(part.square().sum()) for name, part in asked.blocks.split(vectors[:, -1]).items()}
    for name, share in vector["mass"].items():
        assert share == pytest.approx(mass[name], abs=0.02)
    line = content["eigenvectors"][-1]["line"]
    assert line["curvature"] == pytest.approx(float(values[-1]), rel=2e-2)


def test_the_ends_of_the_spectrum_after_a_coarse_search() -> None:
    """Sixteen products find an eigenvalue near the end, and the residual says how near to one; not that it is the last.

    The smallest is −2.55, the next −2.06: intervals of residuals alone leave out the smallest for a fifth of the seeds.
    """
    H, values = cl.hessian(problem()), torch.linalg.eigvalsh(truths()["H"])
    alone = 0
    for seed in range(20):
        result = _pairs(cl.eigs(H, 1, "both", tol=5e-2, max_products=16, seed=seed))
        for top, true in ((True, float(values[-1])), (False, float(values[0]))):
            found = end_of_spectrum(result, len(values), top=top)
            assert found["low"] - 1e-9 <= true <= found["high"] + 1e-9
        near = enclosed(result["values"][0], result["residuals"][0])
        alone += not near["low"] <= float(values[0]) <= near["high"]
    assert alone > 1


def test_the_trace_of_the_whole_is_the_narrower_of_two(tmp_path: Path) -> None:
    """16 samples of the whole say less than all blocks together, which had more budget."""
    asked = problem()
    cl.analyze(asked, tmp_path / "run", "900 gradients")
    study, known = Study(tmp_path / "run"), Known({name: block.size for name, block in asked.blocks.items()})
    for kind in ("ggn", "block", "whole"):
        for record in study.records(kind).values():
            known.add(record, 0.0, 1.0)
    for letter in "HG":
        shown_, parts = _whole_estimates(known, letter)["trace"], _over_blocks(known, letter)
        own = [r.result["trace"] for r in known.of("whole", operator=letter) if r.config["samples"] == 16]
        widths = [_width(each) for each in (parts, *(cautious(estimate(r)) for r in own)) if each is not None]
        assert _width(shown_) == pytest.approx(min(widths), rel=1e-9)
    assert len(widths) > 0


def test_tokens_add_up_to_the_curvature() -> None:
    """The bends of all tokens are the mean of ½ r² uᵀHu and higher even terms."""
    from curvlens.analysis.tokens import moved

    asked = problem()
    _, vectors = torch.linalg.eigh(truths()["H"])
    u, radius = vectors[:, -1], 1e-3
    found = moved(asked, u, radius, most=1000)["tokens"]
    assert len(found) == asked.n_tokens
    curvature = float(u @ truths()["H"] @ u)
    slope = float(asked.gradient() @ u)
    assert sum(t["bend"] for t in found) / len(found) == pytest.approx(radius**2 * curvature / 2, rel=1e-3)
    assert sum(t["slope"] for t in found) / len(found) == pytest.approx(radius * slope, rel=1e-3, abs=1e-9)
