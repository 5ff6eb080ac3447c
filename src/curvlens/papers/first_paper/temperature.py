"""Sections 3.2 and 4.3: temperature, from one-hot attention to even attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.comparisons import DOMINATES, ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import LENGTH, WIDTH, curves, line, norms
from curvlens.papers.parts import SPLIT
from curvlens.papers.ranges import LOCAL, following, told
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, sweep
from curvlens.papers.verdicts import Finding, judged, judged_parts
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

POWERS = {"T-outer": -2, "T-functional": -1}
"""Of t."""
HOT = (10.0, 1000.0)
"""Temperatures with which attention is nearly even."""
BETWEEN = (0.01, 0.1, 1.0)
"""Temperatures between the ends at which the ratio of the parts is told, with the slopes from one to the next."""
VANISHED = 1e-3
"""The share of its largest norm below which a block has vanished."""


def points(effort: Effort) -> list[Config]:
    """From one-hot attention to even attention."""
    return [
        {"temperature": temperature, "seed": seed}
        for seed in effort.repeats(5, 20)
        for temperature in grid(1e-3, 1e3, 13 if effort.quick else 25)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms, those of the split at the scores, and the entropy of the attention rows over its largest value."""
    draw = Draws(config["seed"])
    x, y = draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    w = [draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3)]
    H = attention.hessian(x, w[0], w[1], w[2], target=y, temperature=config["temperature"])
    scores = x @ w[0] @ w[1].mT @ x.mT / math.sqrt(WIDTH) / config["temperature"]
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean() / math.log(LENGTH)
    return {
        "norms": norms(H),
        "t": [sized(H.t_outer().norm()), sized(H.t_functional().norm())],
        "entropy": float(entropy),
    }


def report(records: Sequence[Record]) -> Report:
    """The two parts of the query-key Hessian, and the whole between one-hot and even attention."""
    parts = {name: sweep(records, "temperature", "t", i) for i, name in enumerate(POWERS)}
    entropy = sweep(records, "temperature", "entropy")
    axes = ("temperature $t$", "Frobenius norm", "log", "log")
    chosen = (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VV", "outer"))
    chart = Chart(
        "temperature",
        "Temperature: from one-hot attention to even attention",
        f"One layer with {LENGTH} Gaussian tokens of {WIDTH} dimensions. Left: the query-key Hessian split at the "
        "scores; dashed grey: 1/t² and 1/t. Middle: blocks. Right: the entropy of the attention rows.",
        [
            Panel(
                [part.curve(name, colour=i) for i, (name, part) in enumerate(parts.items())],
                [_guide(part, POWERS[name]) for name, part in parts.items()],
                "split at the scores",
                *axes,  # type: ignore[arg-type]
            ),
            Panel(curves(records, "temperature", chosen), (), "blocks", *axes),  # type: ignore[arg-type]
            Panel([entropy.curve("", shares=True)], (), "entropy", "temperature $t$", "entropy / log L", "log"),
        ],
        columns=3,
    )
    findings = (_temperature(parts["T-outer"], parts["T-functional"]), _one_hot(records, entropy))
    return Report((chart,), findings, notes=marked(records, "temperature", "t"))


def _guide(part: Sweep, power: int) -> Slope:
    aside = 1 / 8 if power == POWERS["T-outer"] else 16  # below the lower curve, above the upper
    return Slope(power, HOT, (HOT[1], part.curve("").y[-1] * aside), rf"$t^{{{power}}}$")


def _temperature(outer: Sweep, functional: Sweep) -> Finding:
    """The powers, and which part is larger at either end; what underflows is left out."""
    places = [place for place in outer.finite().x if place in functional.finite().x]
    outer, functional = outer.at(places), functional.at(places)
    where = following([(outer, POWERS["T-outer"]), (functional, POWERS["T-functional"])])
    cold, hot = (ratio(outer.values[:, end], functional.values[:, end]) for end in (0, -1))
    told_ends = {
        f"the T-outer part dominates at t = {places[0]:.2g}": cold.above(DOMINATES),
        f"the T-functional part dominates at t = {places[-1]:.2g}": hot.below(1 / DOMINATES),
    }
    powers = {"the powers" + (f" for {where.said('t')}" if where else ""): where is not None}
    text = (
        f"For t from {HOT[0]:g} to {HOT[1]:g} the T-outer part falls with t^{outer.law(HOT).slope:.3f} and the "
        f"T-functional part with t^{functional.law(HOT).slope:.3f}; local slopes are within {LOCAL:g} of −2 and −1 for "
        f"{told(where, 't')}. ‖T-outer‖/‖T-functional‖ is {cold} at t = {places[0]:.2g} and {hot} at t = "
        f"{places[-1]:.2g}; a part dominates if it is {DOMINATES:g} times as large.{_between(outer, functional)}"
    )
    if where is not None and where.whole:
        return judged_parts("temperature", text, powers | told_ends)
    true = [name for name, holds in (powers | told_ends).items() if holds]
    return judged("temperature", text, holds=False, when="; ".join(true))


def _between(outer: Sweep, functional: Sweep) -> str:
    """The ratio of the parts between the ends, and their powers from one such temperature to the next."""
    held = [place for place in outer.x if any(math.isclose(place, t, rel_tol=1e-4) for t in BETWEEN)]
    if len(held) < 2:
        return ""
    found = [ratio(outer.at([t]).values[:, 0], functional.at([t]).values[:, 0]) for t in held]
    ratios = "; ".join(f"{each} at t = {t:.2g}" for t, each in zip(held, found, strict=True))
    powers = "; ".join(
        " and ".join(f"t^{part.at(list(ends)).slopes()[0]:.2f}" for part in (outer, functional))
        + f" from {ends[0]:.2g} to {ends[1]:.2g}"
        for ends in pairwise(held)
    )
    return f" Between them the ratio is {ratios}; T-outer and T-functional go with {powers}."


def _one_hot(records: Sequence[Record], entropy: Sweep) -> Finding:
    """Every part of every query-key block of every layer, over the entropy of its attention rows.

    A low temperature alone does not make attention one-hot: two scores may be nearly tied. What underflows has
    vanished.
    """
    cells = [(block, part) for block in ("QQ", "KK", "QK") for part in SPLIT]
    lines = torch.stack([line(records, "temperature", *cell).values.nan_to_num(0.0) for cell in cells])
    shares = lines / lines.amax(2, keepdim=True)  # (cells, seeds, temperatures)
    most = shares.amax(0)  # the block that is left most of
    coldest, cold = entropy.values[:, 0], most[:, 0]
    below = _below(entropy.values, most < VANISHED)
    value = line(records, "temperature", "VV", "outer").values[:, 0]
    stays = f"stays at {float(value.mean()):.2g}" if bool(value.isfinite().all()) else "underflows"
    text = (
        f"At t = {entropy.x[0]:g} (entropy {float(coldest.median()):.1e} of its largest, median) all query-key blocks "
        f"have vanished, to less than {VANISHED:g} of their largest norm over t, in {int((cold < VANISHED).sum())} of "
        f"{len(cold)} layers; the most that is left is {float(cold.max()):.1g}, in a layer with an entropy of "
        f"{float(coldest[cold.argmax()]):.1e}. H_o(V,V) {stays}."
    )
    when = "" if below is None else f"an entropy of at most {below:.1e} of its largest"
    return judged("one-hot", text, holds=bool((cold < VANISHED).all()), when=when)


def _below(entropy: Tensor, gone: Tensor) -> float | None:
    """The largest entropy up to which all blocks of all layers have vanished; None if there are no such layers."""
    order = entropy.flatten().argsort()
    lasting = gone.flatten()[order].long().cumprod(0).sum()
    return float(entropy.flatten()[order[lasting - 1]]) if lasting >= len(entropy) / 2 else None


TEMPERATURE = Experiment(
    "temperature",
    "Temperature, from one-hot to even attention",
    f"{PAPER}, Sections 3.2 and 4.3",
    points,
    measure,
    report,
)
