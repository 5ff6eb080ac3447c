"""The second derivative of LayerNorm, which grows as its input shrinks until ε stops it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.calculus import norms
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.sources import ARTICLE
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, sweep
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel


def points(effort: Effort) -> list[Config]:
    """Tokens of a given spread."""
    return [{"spread": spread, "seed": seed} for seed in effort.repeats(5, 20) for spread in grid(1e-4, 10, 11)]


def measure(config: Config) -> Mapping[str, Any]:
    """‖g · ∂²LN‖₂ of a token, with ε of 1e-5 and without."""
    draw = Draws(config["seed"])
    token, g = config["spread"] * draw(8), draw(8)
    return {
        name: float(torch.linalg.matrix_norm(norms.contracted(token, g, eps=eps), 2))
        for name, eps in (("with", 1e-5), ("without", 1e-30))
    }


def report(records: Sequence[Record]) -> Report:
    """A power law until √ε."""
    lines = {name: sweep(records, "spread", name) for name in ("with", "without")}
    law = lines["without"].law((1e-4, 10))
    largest = float(lines["with"].values.max())
    chart = Chart(
        "layernorm",
        "The second derivative of LayerNorm grows as its input shrinks",
        "Spectral norm of the second derivative of a token's LayerNorm, contracted with a gradient; ε = 10⁻⁵ stops the "
        "growth at a spread of about 0.003.",
        [
            Panel(
                [
                    lines["with"].curve(r"$\varepsilon = 10^{-5}$"),
                    lines["without"].curve(r"$\varepsilon \to 0$", colour=1),
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
    finding = Finding(
        "norm-bounded",
        "holds when" if law.slope < -0.05 else "holds",
        f"It grows with the spread s of a token as s^{law.slope:.3f}; with ε = 1e-5 it reaches {largest:.2g}.",
        "tokens whose spread stays away from 0; else the only bound is 1/ε",
    )
    return Report((chart,), (finding,))


LAYERNORM = Experiment("layernorm", "LayerNorm's second derivative", f"{ARTICLE}, Section 5.4", points, measure, report)
