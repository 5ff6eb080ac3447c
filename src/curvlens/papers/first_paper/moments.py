"""Section 3.2: the blocks follow the attention moments, and shrink as tokens become alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention
from curvlens.papers.comparisons import ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import LENGTH, WIDTH, line, norms
from curvlens.papers.parts import SIGNS, SPLIT, signed
from curvlens.papers.ranges import steady, told
from curvlens.papers.sizes import marked
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel, Slope
from curvlens.study import Config, Record

POWERS = {
    ("QQ", "outer"): 4,
    ("QQ", "functional"): 3,
    ("QK", "functional"): 2,
    ("VQ", "outer"): 2,
    ("VQ", "functional"): 2,
    ("VV", "outer"): 0,
}
BY = {
    ("QQ", "outer"): "M2²",
    ("QQ", "functional"): "M3",
    ("QK", "functional"): "M2, which hides M3",
    ("VQ", "outer"): "M1 M2",
    ("VQ", "functional"): "M2",
    ("VV", "outer"): "M1²",
}
"""The moments that a block has by Remark 3.1: M1 stays, M2 has the power 2, M3 the power 3; tokens stay."""

ALIKE = (1e-3, 0.1)
"""Spreads with which the tokens stay near their mean."""
TOLERANCE = 0.05
"""How far a slope may be from the prediction."""


def points(effort: Effort) -> list[Config]:
    """Tokens with a common mean and deviations of a given spread; attention even, or as it comes."""
    return [
        {"attention": kind, "spread": spread, "seed": seed}
        for kind in ("even", "own")
        for seed in effort.repeats(5, 20)
        for spread in grid(1e-3, 1, 7 if effort.quick else 13)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks."""
    draw = Draws(config["seed"])
    x = draw(1, WIDTH) + config["spread"] * draw(LENGTH, WIDTH)
    y = draw(LENGTH, WIDTH)
    w = [draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3)]
    H = attention.hessian(x, w[0], w[1], w[2], target=y, temperature=1e6 if config["attention"] == "even" else 1.0)
    return {"norms": norms(H)}


def report(records: Sequence[Record]) -> Report:
    """Powers of the spread of the tokens: M1 stays, M2 grows with its square, M3 with its cube."""
    even = where(records, attention="even")
    own = where(records, attention="own")
    panels = []
    for of, title in ((even, "even attention"), (own, "softmax attention")):
        curves: list[Curve] = []
        slopes: list[Slope] = []
        for colour, ((block, part), power) in enumerate(POWERS.items()):
            curve = line(of, "spread", block, part).curve(f"${signed(part, block)}$", colour=colour)
            curves.append(curve)
            label = f"power {power}" if power not in {slope.power for slope in slopes} else ""
            slopes.append(Slope(power, (curve.x[0], 0.1), (curve.x[0], curve.y[0] / 3), label))
        panels.append(
            Panel(curves, slopes, title, "spread of the tokens about their mean", "Frobenius norm", "log", "log")
        )
    chart = Chart(
        "moments",
        "The blocks follow the attention moments",
        "Tokens with a common mean and deviations of a growing size: the first attention moment stays, the second "
        "grows with the square of the spread, the third with its cube. Dashed grey: the powers that Remark 3.1 "
        "gives, drawn a little below. Curves of one power may lie on each other.",
        panels,
    )
    return Report((chart,), (_moments(even), _similar(even, own)), notes=marked(records, "spread", "spread"))


def _moments(even: Sequence[Record]) -> Finding:
    """The power of the spread in each block, while the tokens themselves stay."""
    slopes = {key: line(even, "spread", *key).law(ALIKE).slope for key in POWERS}
    return judged_parts(
        "moments",
        f"Powers of the tokens' spread with even attention, spread ≤ {ALIKE[1]:g} (predicted with a tolerance of "
        f"{TOLERANCE:g}, and the moments that give it: M1 is constant, M2 has the power 2, M3 the power 3): "
        + ", ".join(
            f"{signed(part, block)} {slope:.3f} ({POWERS[block, part]} by {BY[block, part]})"
            for (block, part), slope in slopes.items()
        )
        + ".",
        {signed(part, block): abs(slope - POWERS[block, part]) <= TOLERANCE for (block, part), slope in slopes.items()},
    )


def _similar(even: Sequence[Record], own: Sequence[Record]) -> Finding:
    """The query-key blocks beside the value block, from nearly equal tokens to independent ones."""
    parts: dict[str, bool | None] = {}
    texts = []
    for of, name in ((even, "even attention"), (own, "softmax attention")):
        for part in SPLIT:
            share = _beside_value(of, part).finite()
            where = steady(share)
            more = ratio(share.values[:, -1], share.values[:, 0])
            whole = where is not None and where.whole
            parts[f"{SIGNS[part]}, {name}"] = more.above() if whole else False
            if where and not whole:
                parts[f"{SIGNS[part]}, {name}, {where.said('spread')}"] = True
            ends = share.middle().tolist()
            texts.append(
                f"{SIGNS[part]}, {name}: from {ends[0]:.2g} to {ends[-1]:.2g}, {more} times as large, rising for "
                f"{told(where, 'spread')}"
            )
    return judged_parts(
        "similar",
        "Norm of the blocks (Q,Q), (K,K) and (Q,K) over ‖H_o(V,V)‖, from nearly equal tokens to independent ones: "
        + "; ".join(texts)
        + ".",
        parts,
    )


def _beside_value(records: Sequence[Record], part: str) -> Sweep:
    lines = {block: line(records, "spread", block, part) for block in ("QQ", "KK", "QK")}
    inner = lines["QQ"].values.square() + lines["KK"].values.square() + 2 * lines["QK"].values.square()
    return Sweep(lines["QQ"].x, inner.sqrt() / line(records, "spread", "VV", "outer").values)


MOMENTS = Experiment(
    "moments",
    "Attention moments and similar tokens",
    f"{PAPER}, Section 3.2",
    points,
    measure,
    report,
)
