"""The second derivative of LayerNorm, which grows as its input shrinks until ε stops it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.calculus import norms
from curvlens.papers.comparisons import ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, grid, sweep
from curvlens.papers.verdicts import Finding, judged
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

EPS = 1e-5
"""As PyTorch and the papers have it."""
BOUNDED = 10.0
"""So many times its size at a spread of 1, a term that depends on its input still counts as bounded."""


def points(effort: Effort) -> list[Config]:
    """Tokens of a given spread."""
    return [{"spread": spread, "seed": seed} for seed in effort.repeats(5, 20) for spread in grid(1e-4, 10, 11)]


def measure(config: Config) -> Mapping[str, Any]:
    """‖g · ∂²LN‖₂ of a token, with ε and without."""
    draw = Draws(config["seed"])
    token, g = config["spread"] * draw(8), draw(8)
    return {
        name: float(torch.linalg.matrix_norm(norms.contracted(token, g, eps=eps), 2))
        for name, eps in (("with", EPS), ("without", 1e-30))
    }


def report(records: Sequence[Record]) -> Report:
    """The curve with ε and without."""
    lines = {name: sweep(records, "spread", name) for name in ("with", "without")}
    chart = Chart(
        "layernorm",
        "The second derivative of LayerNorm over the spread of its input",
        "Spectral norm of the second derivative of the LayerNorm of a token of 8 random entries, contracted with a "
        "random gradient, with ε as it is used and with one that does nothing; spread is the standard deviation of the "
        "entries.",
        [
            Panel(
                [
                    lines["with"].curve(r"$\varepsilon = 10^{-5}$"),
                    lines["without"].curve(r"$\varepsilon = 10^{-30}$", colour=1),
                ],
                (),
                "",
                "spread of the token",
                r"$\|g\cdot\partial^2\mathrm{LN}\|_2$",
                "log",
                "log",
            )
        ],
        columns=1,
    )
    return Report((chart,), (_bounded(lines["with"].finite()),), notes=marked(records, "spread", "spreads"))


def _bounded(line: Sweep) -> Finding:
    """How far the curve rises above its size at a spread of 1, and whether it stops rising inside the grid."""
    middle = line.middle().tolist()
    peak = max(range(len(middle)), key=lambda place: middle[place])
    unit = min(range(len(middle)), key=lambda place: abs(math.log(line.x[place])))
    over = ratio(line.values[:, peak], line.values[:, unit])
    stops = 0 < peak < len(middle) - 1
    low = high = unit
    while low > 0 and middle[low - 1] <= BOUNDED * middle[unit]:
        low -= 1
    while high < len(middle) - 1 and middle[high + 1] <= BOUNDED * middle[unit]:
        high += 1
    bounded = over.below(BOUNDED)
    text = (
        f"‖g · ∂²LN‖₂ with ε = {EPS:g} is largest at a spread (standard deviation of the token's entries) of "
        f"{line.x[peak]:.2g}, {over} times its value at a spread of {line.x[unit]:.2g}"
        + (", and falls on both sides." if stops else ", where the measured spreads end.")
        + f" Bounded means below {BOUNDED:g} times that value."
    )
    ends = high == len(middle) - 1
    where = f"of at least {line.x[low]:.2g}" if ends else f"from {line.x[low]:.2g} to {line.x[high]:.2g}"
    when = f"spreads {where}" if stops and bounded is False else ""
    return judged("norm-bounded", text, holds=bounded, when=when)


LAYERNORM = Experiment("layernorm", "LayerNorm's second derivative", f"{ARTICLE}, Section 5.4", points, measure, report)
