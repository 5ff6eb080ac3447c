"""Appendix E.1: how the blocks of a value W_O W_U of low rank depend on the first moment and on the value matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from curvlens.calculus import attention
from curvlens.calculus.attention import AttentionHessian
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import LENGTH
from curvlens.papers.ranges import LOCAL, Range, following, told
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, sweep, where
from curvlens.papers.verdicts import Finding, judged
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

WIDTH, HEADS = 8, 2
SCALED = {"moment": "M1", "value": "W_O and W_U", "down": "W_O", "up": "W_U"}
"""What is multiplied with a size; the attention matrices stay as they are."""
BLOCKS = ("OO", "UU", "OU")
POWER = 2
"""Quadratic."""
SMALL, LARGE = (0.01, 0.1), (10.0, 100.0)


def points(effort: Effort) -> list[Config]:
    """One factor over four decades, with targets of size 1 and without."""
    return [
        {"scaled": scaled, "target": target, "size": size, "seed": seed}
        for scaled, targets in (("moment", (1.0, 0.0)), ("value", (1.0,)), ("down", (1.0,)), ("up", (1.0,)))
        for target in targets
        for seed in effort.repeats(5, 20)
        for size in grid(0.01, 100, 9 if effort.quick else 17)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖ of the three blocks of W_O and W_U over all heads, and ‖H_f‖ of the mixed one."""
    H = layer(config)[-1]
    outer = {block: _over_heads(H, block, "outer") for block in BLOCKS}
    return {"outer": {block: sized(value) for block, value in outer.items()}, "OU": sized(_over_heads(H, "OU", "f"))}


def layer(config: Config) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], Tensor, AttentionHessian]:
    """Tokens, W_Q, W_K, (W_O, W_U), targets and the Hessian of a layer; M1 scales with the tokens at fixed scores."""
    own, size, scaled = Draws(config["seed"], "weights"), config["size"], config["scaled"]
    rank = WIDTH // HEADS
    q, k, down = (own(HEADS, WIDTH, rank, scale=WIDTH**-0.5) for _ in range(3))
    up = own(HEADS, rank, WIDTH, scale=rank**-0.5)
    x = Draws(config["seed"], "tokens")(LENGTH, WIDTH)
    y = config["target"] * Draws(config["seed"], "targets")(LENGTH, WIDTH)
    if scaled == "moment":  # (x s)(W_Q/s)(W_K/s)ᵀ(x s)ᵀ is as before: A stays, and A x s = s M1
        x, q, k = size * x, q / size, k / size
    down = size * down if scaled in ("value", "down") else down
    up = size * up if scaled in ("value", "up") else up
    return x, q, k, (down, up), y, attention.hessian(x, q, k, (down, up), target=y)


def _over_heads(H: AttentionHessian, block: str, part: str) -> float:
    """The norm of a block over all pairs of heads; the paper's W_O and W_U are the library's V and O."""
    letters = {"O": "V", "U": "O"}
    first, second = (letters[letter] for letter in block)
    form = H.outer if part == "outer" else H.functional
    pairs = [(f"{first}{a}", f"{second}{b}") for a in range(HEADS) for b in range(HEADS)]
    return float(sum(form.norm(pair) ** 2 for pair in pairs) ** 0.5)


def report(records: Sequence[Record]) -> Report:
    """Powers of the first moment and of the value matrices."""
    unit, zero = (where(records, scaled="moment", target=target) for target in (1.0, 0.0))
    mixed = {"targets of size 1": sweep(unit, "size", "OU"), "no target": sweep(zero, "size", "OU")}
    moment = _outer(unit)
    values = {name: _outer(where(records, scaled=name)) for name in ("value", "down", "up")}
    slope = r"$d\,\log\|\cdot\|\,/\,d\,\log s$"
    chart = Chart(
        "value-factors",
        "A value of low rank: powers of the first moment and of the value matrices",
        f"One layer of {HEADS} heads with values W_O W_U of rank {WIDTH // HEADS}, {LENGTH} Gaussian tokens of {WIDTH} "
        "dimensions, square loss, attention matrices that stay as they are. Left: local slopes of the functional part "
        "of the mixed block over a factor s of M1. Middle: norms of the outer part over the same. Right: over a factor "
        "of both value matrices. Dashed grey: s².",
        [
            Panel(
                [line.local(name, colour=i) for i, (name, line) in enumerate(mixed.items())],
                (),
                "$H_f(W_O, W_U)$ over M1",
                "$s$",
                slope,
                "log",
                y_lines=(1.0, 2.0),
            ),
            _panel(moment, "$H_o$ over M1"),
            _panel(values["value"], "$H_o$ over $W_O$ and $W_U$"),
        ],
        columns=3,
    )
    return Report((chart,), (_quadratic(mixed, moment, values),), notes=marked(records, "size", "s"))


def _outer(records: Sequence[Record]) -> dict[str, Sweep]:
    return {block: sweep(records, "size", "outer", block) for block in BLOCKS}


def _panel(lines: Mapping[str, Sweep], title: str) -> Panel:
    """Norms: their local slopes are 2 but for rounding, and would show that alone."""
    curves = [line.curve(f"$(W_{b[0]}, W_{b[1]})$", colour=i) for i, (b, line) in enumerate(lines.items())]
    first = min(curve.y[0] for curve in curves)
    guide = Slope(POWER, (curves[0].x[0], curves[0].x[-1]), (curves[0].x[0], first / 4), "$s^2$")
    return Panel(curves, (guide,), title, "$s$", "Frobenius norm", "log", "log")


def _quadratic(
    mixed: Mapping[str, Sweep], moment: Mapping[str, Sweep], values: Mapping[str, Mapping[str, Sweep]]
) -> Finding:
    """Three parts, each on a whole grid or on a part of it."""
    functional = mixed["targets of size 1"]
    parts: dict[str, Range | None] = {
        "H_f(O,U) in M1": following([(functional, POWER)]),
        "H_o in M1": following((line, POWER) for line in moment.values()),
        "H_o in the value matrices together": following((line, POWER) for line in values["value"].values()),
    }
    single = "; ".join(
        f"{SCALED[name]} alone "
        + ", ".join(f"{_power(line)} ({block[0]},{block[1]})" for block, line in values[name].items())
        for name in ("down", "up")
    )
    ends = [functional.slope("", window) for window in (SMALL, LARGE)]
    text = (
        f"‖H_f(O,U)‖ grows with M1 to the power {ends[0].value:.3f} ± {ends[0].error:.3f} for factors up to "
        f"{SMALL[1]:g}, where the residual is the target's, and {ends[1].value:.3f} ± {ends[1].error:.3f} from "
        f"{LARGE[0]:g} on; without a target with {mixed['no target'].law((0.01, 100.0)).slope:.3f} throughout. Powers "
        "of ‖H_o‖: M1 "
        + ", ".join(f"{_power(line)} ({b[0]},{b[1]})" for b, line in moment.items())
        + "; W_O and W_U together "
        + ", ".join(f"{_power(line)} ({b[0]},{b[1]})" for b, line in values["value"].items())
        + f"; {single}. Local slopes are within {LOCAL:g} of {POWER}: "
        + "; ".join(f"{name} for {told(found, 's')}" for name, found in parts.items())
        + "."
    )
    true = [
        name if found.whole else f"{name} for factors {found.said('s')}"
        for name, found in parts.items()
        if found is not None
    ]
    return judged(
        "low-rank-moment",
        text,
        holds=all(found is not None and found.whole for found in parts.values()),
        when="; ".join(true),
    )


def _power(line: Sweep) -> str:
    """The slope for small factors; a zero has no sign."""
    return f"{round(line.law(SMALL).slope, 2) + 0.0:.2f}"


VALUE_FACTORS = Experiment(
    "value-factors", "A value of low rank over its factors", f"{PAPER}, Appendix E.1", points, measure, report
)
