"""Section 3.2: the blocks follow the attention moments, and shrink as tokens become alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper.layer import LENGTH, WIDTH, line, norms
from curvlens.experiments.parts import signed
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel, Slope

POWERS = {
    ("QQ", "outer"): 4,  # M2², and X stays
    ("QQ", "functional"): 3,  # M3
    ("QK", "functional"): 2,  # M2, beside M3
    ("VQ", "outer"): 2,  # M1 M2
    ("VQ", "functional"): 2,  # M2
    ("VV", "outer"): 0,  # M1²
}


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
    texts, worst, panels = [], 0.0, []
    for of, title in ((even, "even attention"), (own, "softmax attention")):
        curves, slopes = [], []
        for colour, ((block, part), power) in enumerate(POWERS.items()):
            found = line(of, "spread", block, part)
            curve = found.curve(f"${signed(part, block)}$", colour=colour)
            curves.append(curve)
            slopes.append(Slope(power, (curve.x[0], 0.1), (curve.x[0], curve.y[0] / 3)))
            if of is even:
                slope = found.law((1e-3, 0.1)).slope
                worst = max(worst, abs(slope - power))
                texts.append(f"{signed(part, block)} {slope:.3f} ({power})")
        panels.append(
            Panel(curves, slopes, title, "spread of the tokens about their mean", "Frobenius norm", "log", "log")
        )
    chart = Chart(
        "moments",
        "The blocks follow the attention moments",
        "Tokens with a common mean and deviations of a growing size: the first attention moment stays, the second "
        "grows with the square of the spread, the third with its cube. Dashed grey: the powers that Remark 3.1 "
        "gives.",
        panels,
    )
    share = line(own, "spread", "QQ", "outer").values / line(own, "spread", "VV", "outer").values
    rising = bool((share.log().mean(0).diff() > 0).all())
    ends = share.log().mean(0).exp()
    findings = (
        Finding(
            "moments",
            "holds" if worst < 0.05 else "does not hold",
            "Powers of the tokens' spread with even attention, spread ≤ 0.1 (predicted): " + ", ".join(texts) + ".",
        ),
        Finding(
            "similar",
            "holds" if rising else "does not hold",
            f"‖H_o(Q,Q)‖ / ‖H_o(V,V)‖ rises with every step of the spread, from {float(ends[0]):.2g} for nearly "
            f"equal tokens to {float(ends[-1]):.2g} for independent ones.",
        ),
    )
    return Report((chart,), findings)


MOMENTS = Experiment(
    "moments",
    "Attention moments and similar tokens",
    f"{PAPER}, Section 3.2",
    points,
    measure,
    report,
)
