"""Section 3.3: with which powers the blocks of attention depend on each of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from curvlens.calculus import attention, exponents
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import BLOCKS, LENGTH, WIDTH, line, norms
from curvlens.papers.parts import SPLIT, signed
from curvlens.papers.sizes import marked
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import grid, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

SIZES = (1e-4, 1.0)
"""Of the tokens."""
FACTORS = (0.1, 10.0)
TOLERANCE = 0.02
"""How far a power may be from the predicted one."""


def points(effort: Effort) -> list[Config]:
    """Each weight is scaled by itself; tokens so small that attention stays even, and tokens of size 1."""
    return [
        {"tokens": size, "weight": weight, "factor": factor, "seed": seed}
        for size in SIZES
        for weight in "QKV"
        for seed in effort.repeats(5, 20)
        for factor in grid(*FACTORS, 5 if effort.quick else 9)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms with one weight scaled, and the size of the scores; the residual stays, as the targets move along."""
    draw = Draws(config["seed"])
    x, residual = draw(LENGTH, WIDTH, scale=config["tokens"]), draw(LENGTH, WIDTH)
    w = {letter: draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for letter in "QKV"}
    w[config["weight"]] *= config["factor"]
    target = attention.forward(x, w["Q"], w["K"], w["V"]) + residual
    return {
        "norms": norms(attention.hessian(x, w["Q"], w["K"], w["V"], target=target)),
        "scores": float((x @ w["Q"] @ w["K"].mT @ x.mT / math.sqrt(WIDTH)).abs().max()),
    }


def report(records: Sequence[Record]) -> Report:
    """Powers of every weight in every block."""
    small, large = (where(records, tokens=size) for size in SIZES)
    powers, beyond = _powers(small), _powers(large)
    names = [signed(part, block) for block, part in powers]
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
                        list(range(len(names))),
                        [found[weight] for found in powers.values()],
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
    return Report((chart,), (_weights(records, powers, beyond),), notes=marked(records, "factor", "factors"))


def _powers(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """Of each weight in each block that is not zero."""
    return {
        (block, part): {
            weight: line(where(records, weight=weight), "factor", block, part).law(FACTORS).slope for weight in "QKV"
        }
        for block in BLOCKS
        for part in SPLIT
        if exponents.predicted(part, block).data is not None
    }


def _apart(powers: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, float]:
    """Of each block, the largest difference of a power from the predicted one."""
    found = {}
    for (block, part), row in powers.items():
        predicted = exponents.predicted(cast(Any, part), block).weights
        found[signed(part, block)] = max(abs(power - predicted.get(weight, 0)) for weight, power in row.items())
    return found


def _weights(
    records: Sequence[Record],
    powers: Mapping[tuple[str, str], Mapping[str, float]],
    beyond: Mapping[tuple[str, str], Mapping[str, float]],
) -> Finding:
    """Judged where scores are small, and softmax hears nothing of the weights; and how much it does beyond."""
    apart, far = _apart(powers), _apart(beyond)
    scores = [max(record.result["scores"] for record in where(records, tokens=size)) for size in SIZES]
    text = "; ".join(f"{signed(part, block)}: {_told(row)}" for (block, part), row in powers.items())
    return judged_parts(
        "weights",
        f"With scores up to {scores[0]:.0e} powers differ from the predictions by up to {max(apart.values()):.3f} (to "
        f"be met within {TOLERANCE:g}): {text}. With scores up to {scores[1]:.2g} softmax hears the weights as well, "
        f"and powers of W_Q, W_K and W_V differ by up to {max(far.values()):.2f}.",
        {name: difference <= TOLERANCE for name, difference in apart.items()},
    )


def _told(row: Mapping[str, float]) -> str:
    """``W_K^2.00 W_V^1.00``, without weights whose power is within the tolerance of 0."""
    return " ".join(f"W_{weight}^{power:.2f}" for weight, power in row.items() if abs(power) > TOLERANCE) or "none"


WEIGHTS = Experiment("weights", "Powers of the weights", f"{PAPER}, Section 3.3", points, measure, report, revision=2)
