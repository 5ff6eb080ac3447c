"""Spectral bounds of layers and blocks: whether they hold, and how far above the truth they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens import assembly
from curvlens.calculus import attention, bounds, feedforward, norms
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.sizes import marked, number
from curvlens.papers.sources import SECOND
from curvlens.papers.sweeps import grid, sweep, where
from curvlens.papers.verdicts import Finding, judged
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

OF = {
    "attention": "attention",
    "norm": "LayerNorm",
    "feedforward": "feed-forward",
    "block none": "block, no norm",
    "block pre": "block, Pre-LN",
    "block post": "block, Post-LN",
}
WAYS = {"prior": "from norms of tokens and weights alone", "data": "from the data"}
ROUNDING = 1e-9
"""By which a bound that is reached may be below the truth, which is stored with ten digits."""


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
    label = r"bound / $\|H\|_2$"
    panels = [
        Panel(
            [
                sweep(where(records, of=of), "sigma", way).finite().curve(name, colour=colour)
                for colour, (of, name) in enumerate(OF.items())
            ],
            (),
            title,
            r"$\sigma$ of the tokens",
            label,
            "log",
            "log",
            y_lines=(1.0,),
            legend=way == "prior",
        )
        for way, title in WAYS.items()
    ]
    chart = Chart(
        "bounds",
        "Spectral bounds of layers and blocks over the truth",
        "Bound over the true spectral norm of the Hessian, for one sample: geometric mean over the seeds. One colour a "
        "layer or block in both panels.",
        panels,
    )
    return Report((chart,), (_attention(records),), notes=marked(records))


def _attention(records: Sequence[Record]) -> Finding:
    """Attention by its own points, at every σ; the other layers and blocks beside it."""
    own, others = where(records, of="attention"), [r for r in records if r.config["of"] != "attention"]
    sigmas = sorted({record.config["sigma"] for record in own})
    valid = {sigma: not any(_violations(where(own, sigma=sigma)).values()) for sigma in sigmas}
    texts = [_extent(where(records, of=of), name) for of, name in OF.items()]
    broken, beside = _violations(own), _violations(others)
    return judged(
        "bound",
        "The constants of Theorem 1 are not judged, since our text of the source lacks them: this is a bound of "
        "its form with constants of our own derivation, once from norms alone and once from the data. Attention, "
        f"points with a bound below the truth: {_told(broken, len(own))}. Layers and blocks beside it: "
        f"{_told(beside, len(others))}. Bound over truth, geometric means, smallest and largest over σ: "
        f"{'; '.join(texts)}.",
        holds=all(valid.values()),
        when=", ".join(f"σ = {sigma:g}" for sigma, holds in valid.items() if holds),
    )


def _violations(records: Sequence[Record]) -> dict[str, int]:
    """How many points have a bound below the truth, beyond rounding."""
    return {way: sum(number(r.result[way]) < 1 - ROUNDING for r in records) for way in WAYS}


def _told(violations: Mapping[str, int], of: int) -> str:
    return ", ".join(f"{count} of {of} {WAYS[way]}" for way, count in violations.items())


def _extent(records: Sequence[Record], name: str) -> str:
    found = []
    for way in WAYS:
        line = sweep(records, "sigma", way).finite()
        middle = line.middle()
        found.append(f"{float(middle.min()):.2g} to {float(middle.max()):.2g}" if line.x else "no numbers")
    return f"{name} {found[0]} and {found[1]}"


BOUNDS = Experiment(
    "bounds",
    "Spectral bounds of layers and blocks",
    f"{SECOND}, Theorem 1",
    points,
    measure,
    report,
)
