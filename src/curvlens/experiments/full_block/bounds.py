"""Spectral bounds of layers and blocks: whether they hold, and how far above the truth they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens import assembly
from curvlens.calculus import attention, bounds, feedforward, norms
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.sources import SECOND
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel

OF = {
    "attention": "attention",
    "norm": "LayerNorm",
    "feedforward": "feed-forward",
    "block none": "block, no norm",
    "block pre": "block, Pre-LN",
    "block post": "block, Post-LN",
}


def points(effort: Effort) -> list[Config]:
    """Layers and blocks of one sample, with small and large tokens."""
    return [
        {"of": of, "sigma": sigma, "seed": seed}
        for of in OF
        for seed in effort.repeats(10, 50)
        for sigma in grid(0.01, 10, 4 if effort.quick else 10)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Bound over the true spectral norm, from norms alone and from the data."""
    draw, (length, width), of = Draws(config["seed"]), (6, 4), config["of"]
    x, y = config["sigma"] * draw(length, width), draw(length, width)
    scale = 1 / math.sqrt(width)
    w = {name: draw(width, width, scale=scale) for name in "qkvo"}
    w |= {"up": draw(width, 2 * width, scale=scale), "down": draw(2 * width, width, scale=scale / math.sqrt(2))}
    if of == "attention":
        true: Any = attention.hessian(x, w["q"], w["k"], w["v"], target=y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.attention(x, w["q"], w["k"], w["v"], y, data=data)
    elif of == "norm":
        ones = torch.ones_like(x[0])
        true = norms.hessian(x, ones, 0 * ones, y, wrt="scale shift X").total

        def bound(data: bool) -> bounds.Bound:
            return bounds.norm(x, ones, 0 * ones, y, wrt="scale shift X", data=data)
    elif of == "feedforward":
        true = feedforward.hessian(x, w["up"], w["down"], y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.feedforward(x, w["up"], w["down"], y, data=data)
    else:
        norm: Any = of.split()[1]
        true = assembly.block(w, heads=1, norm=norm).hessian(x, target=y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.block(x, w, y, heads=1, norm=norm, data=data)

    size = float(torch.linalg.matrix_norm(true.dense(), 2))
    return {"prior": bound(False).total / size, "data": bound(True).total / size}


def report(records: Sequence[Record]) -> Report:
    """Whether they hold, and how far above they are."""
    panels, texts, least = [], [], math.inf
    for way, title in (("prior", "from norms of tokens and weights alone"), ("data", "from the data")):
        curves = []
        for colour, (of, name) in enumerate(OF.items()):
            line = sweep(where(records, of=of), "sigma", way)
            curves.append(line.curve(name, colour=colour))
            least = min(least, float(line.values.min()))
            middle = line.middle()
            how = "a priori" if way == "prior" else "by data"
            texts.append(f"{name} {how} {float(middle.min()):.2g} to {float(middle.max()):.2g}")
        label = r"bound / $\|H\|_2$"
        panels.append(Panel(curves, (), title, r"$\sigma$ of the tokens", label, "log", "log", y_lines=(1.0,)))
    chart = Chart(
        "bounds",
        "Spectral bounds of layers and blocks: valid, and loose",
        "Bound over the true spectral norm of the Hessian, for one sample: geometric mean over the seeds.",
        panels,
    )
    finding = Finding(
        "bound",
        "holds" if least >= 1 - 1e-12 else "does not hold",
        f"Never violated in {len(records)} layers and blocks, with corrected constants; the smallest bound over "
        f"truth is {least:.3f}. Geometric means, smallest and largest over σ: {'; '.join(texts)}.",
    )
    return Report((chart,), (finding,))


BOUNDS = Experiment(
    "bounds",
    "Spectral bounds of layers and blocks",
    f"{SECOND}, Theorem 1",
    points,
    measure,
    report,
)
