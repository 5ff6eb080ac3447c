"""Section 3.3: with which powers the blocks of attention depend on each of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention, exponents
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper.layer import BLOCKS, LENGTH, WIDTH, line, norms
from curvlens.experiments.parts import SPLIT, signed
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel


def points(effort: Effort) -> list[Config]:
    """Each weight is scaled by itself; tokens so small that attention stays even, so that the weights act beside it."""
    return [
        {"weight": weight, "factor": factor, "seed": seed}
        for weight in "QKV"
        for seed in effort.repeats(5, 20)
        for factor in grid(0.1, 10, 5 if effort.quick else 9)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms with one weight scaled; the targets stay, so that the residual does."""
    draw = Draws(config["seed"])
    x, y = draw(LENGTH, WIDTH, scale=1e-4), draw(LENGTH, WIDTH)
    w = {letter: draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for letter in "QKV"}
    w[config["weight"]] *= config["factor"]
    return {"norms": norms(attention.hessian(x, w["Q"], w["K"], w["V"], target=y))}


def report(records: Sequence[Record]) -> Report:
    """Powers of every weight in every block."""
    worst, rows, names = 0.0, [], []
    for block in BLOCKS:
        for part in SPLIT:
            growth = exponents.predicted(part, block)
            if growth.data is None:
                continue
            row = []
            for weight in "QKV":
                of = where(records, weight=weight)
                slope = line(of, "factor", block, part).law((0.1, 10)).slope
                worst = max(worst, abs(slope - growth.weights.get(weight, 0)))
                row.append(slope)
            rows.append(row)
            names.append(signed(part, block))
    chart = Chart(
        "weights",
        "Powers of the weights in the blocks of attention",
        "How the norm of each block grows when one of the weights is scaled by 0.1 to 10 and attention stays even: "
        "quadratic, linear or not at all.",
        [
            Panel(
                [
                    Curve(
                        f"$W_{weight}$",
                        list(range(len(rows))),
                        [row[j] for row in rows],
                        colour=j,
                        style="bars",
                    )
                    for j, weight in enumerate("QKV")
                ],
                y_label="power of the weight",
                ticks=(list(range(len(names))), [f"${name}$".replace("(", "$\n$(") for name in names]),
            )
        ],
        columns=1,
    )
    text = "; ".join(f"{name}: {_powers(row)}" for name, row in zip(names, rows, strict=True))
    finding = Finding(
        "weights",
        "holds when" if worst < 0.02 else "does not hold",
        f"Largest difference of a power from the prediction: {worst:.3f}. Measured: {text}.",
        "beside the weights' influence through the attention matrix, that is for small scores",
    )
    return Report((chart,), (finding,))


def _powers(row: Sequence[float]) -> str:
    """``K² V²`` with the measured powers."""
    found = [f"W_{weight}^{power:.2f}" for weight, power in zip("QKV", row, strict=True) if abs(power) > 0.005]
    return " ".join(found) or "none"


WEIGHTS = Experiment("weights", "Powers of the weights", f"{PAPER}, Section 3.3", points, measure, report)
