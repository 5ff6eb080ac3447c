"""Section 3.1 as it is stated, for one layer with square loss: Jacobians, and the two parts of the Hessian, over σ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.comparisons import DOMINATES, ratio, undecided
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.differentiated import jacobian_norm
from curvlens.papers.first_paper.growth import LARGE, SMALL, WHOLE
from curvlens.papers.first_paper.layer import BLOCKS, LENGTH, WIDTH, line, norms
from curvlens.papers.parts import signed
from curvlens.papers.ranges import LOCAL, following, judged_range, told
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, sweep
from curvlens.papers.verdicts import Finding, judged
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

POWERS = {"Q": 3, "K": 3, "V": 1}
"""Of σ in the Jacobians."""


def points(effort: Effort) -> list[Config]:
    """The σ of Figure 3a."""
    return [
        {"sigma": sigma, "seed": seed}
        for seed in effort.repeats(5, 20)
        for sigma in grid(*WHOLE, 10 if effort.quick else 20)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks, the root mean square of the residual, and the Jacobians by automatic differentiation."""
    draw = Draws(config["seed"])
    x, y = config["sigma"] * draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    w = {letter: draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for letter in "QKV"}

    def output(letter: str, moved: Tensor) -> Tensor:
        own = w | {letter: moved}
        found: Tensor = (x @ own["Q"] @ own["K"].mT @ x.mT / math.sqrt(WIDTH)).softmax(-1) @ x @ own["V"]
        return found

    return {
        "norms": norms(attention.hessian(x, w["Q"], w["K"], w["V"], target=y)),
        "residual": float((output("V", w["V"]) - y).square().mean().sqrt()),
        "jacobian": {
            letter: sized(jacobian_norm(lambda moved, of=letter: output(of, moved), w[letter]))  # type: ignore[misc]
            for letter in POWERS
        },
    }


def report(records: Sequence[Record]) -> Report:
    """Powers of the Jacobians, and which part is larger at large σ."""
    jacobians = {letter: sweep(records, "sigma", "jacobian", letter) for letter in POWERS}
    outer, functional = (_whole(records, part) for part in ("outer", "functional"))
    residual = sweep(records, "sigma", "residual")
    ignored = Sweep(functional.x, functional.values / residual.values)
    axes = (r"$\sigma$", "Frobenius norm", "log", "log")
    chart = Chart(
        "layer",
        "One attention layer over the size of its tokens",
        f"{LENGTH} Gaussian tokens of {WIDTH} dimensions with standard deviation σ, targets of size 1. Left: the "
        "Jacobians of the output; dashed grey: σ and σ³, drawn a little below. Right: both parts of the whole Hessian, "
        "the functional one also over the root mean square of the residual.",
        [
            Panel(
                [found.curve(f"$W_{letter}$", colour=i) for i, (letter, found) in enumerate(jacobians.items())],
                [_guide(jacobians[letter], POWERS[letter]) for letter in ("Q", "V")],
                "Jacobians",
                *axes,  # type: ignore[arg-type]
            ),
            Panel(
                [
                    outer.curve("$H_o$"),
                    functional.curve("$H_f$", colour=1),
                    ignored.curve("$H_f$ / residual", colour=1, style="dashed"),
                ],
                (),
                "parts of the Hessian",
                *axes,  # type: ignore[arg-type]
            ),
        ],
    )
    return Report((chart,), (_jacobians(jacobians), _outer_large(records)), notes=marked(records))


def _guide(found: Sweep, power: int) -> Slope:
    curve = found.curve("")
    label = rf"$\sigma^{power}$" if power > 1 else r"$\sigma$"
    return Slope(power, (curve.x[0], 1.0), (curve.x[0], curve.y[0] / 3), label)


def _whole(records: Sequence[Record], part: str) -> Sweep:
    """The norm of a part over all blocks, those off the diagonal twice; what underflows adds nothing."""
    lines = {block: line(records, "sigma", block, part) for block in BLOCKS}
    squares = [(2 if block[0] != block[1] else 1) * found.values.square() for block, found in lines.items()]
    return Sweep(lines["QQ"].x, torch.stack(squares).nan_to_num(0.0).sum(0).sqrt())


def _jacobians(found: Mapping[str, Sweep]) -> Finding:
    where = following((found[letter], float(power)) for letter, power in POWERS.items())
    texts = [
        f"∂F/∂W_{letter} {found[letter].law(SMALL).slope:.3f} ({power}; {told(following([(found[letter], power)]))}; "
        f"{found[letter].law(LARGE).slope:.2f})"
        for letter, power in POWERS.items()
    ]
    return judged_range(
        "jacobians",
        f"Slope for σ ≤ {SMALL[1]:g} (predicted; where local slopes are within {LOCAL:g} of that; slope for σ from "
        f"{LARGE[0]:g} to {LARGE[1]:g}): {', '.join(texts)}.",
        where,
    )


def _outer_large(records: Sequence[Record]) -> Finding:
    """The parts at the largest σ, without the residual and with it."""
    residual = sweep(records, "sigma", "residual").values[:, -1]
    outer, functional = (_whole(records, part) for part in ("outer", "functional"))
    free = ratio(outer.values[:, -1] * residual, functional.values[:, -1])
    texts, dominated = [], []
    for block in BLOCKS:
        if block == "VV":
            continue
        o, f = (line(records, "sigma", block, part).values[:, -1] for part in ("outer", "functional"))
        own = ratio(o * residual, f)
        texts.append(f"{signed('outer', block)[3:]} {own}")
        dominated += [block] if own.above(DOMINATES) else []
    holds = free.above(DOMINATES)
    return judged(
        "outer-large",
        f"At σ = {outer.x[-1]:g}, ‖H_o‖ over ‖H_f‖ divided by the root mean square of the residual: {free} for the "
        f"whole Hessian; blocks: {', '.join(texts)}. With the residual as it is: "
        f"{ratio(outer.values[:, -1], functional.values[:, -1])} for the whole Hessian. A part dominates if it is "
        f"{DOMINATES:g} times as large.{undecided(holds, free.count)}",
        holds=holds,
        when=f"the blocks {', '.join(dominated)}" if dominated and holds is False else "",
    )


LAYER = Experiment(
    "layer",
    "One attention layer over the size of its tokens",
    f"{PAPER}, Section 3.1",
    points,
    measure,
    report,
)
