"""Figure 7: linear attention in depth, where every layer triples the power of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from curvlens.calculus import attention, exponents
from curvlens.data import Addition
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report, at_width
from curvlens.papers.first_paper.depths import depths, layers, of_layer
from curvlens.papers.parts import PARTS
from curvlens.papers.ranges import LOCAL, following
from curvlens.papers.sizes import frobenius, marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

SIGMAS = (0.01, 100.0)
SMALL, LARGE = (SIGMAS[0], 0.1), (10.0, SIGMAS[1])
SEQUENCES = 16
NAMES = {"Q": "query", "K": "key", "V": "value"}


def points(effort: Effort) -> list[Config]:
    """One to three layers of linear attention."""
    count, width = (9, 6) if effort.quick else (25, 12)
    return [
        {"depth": depth, "width": width, "sigma": sigma, "seed": seed}
        for depth in (1, 2, 3)
        for seed in effort.repeats(3, 10)
        for sigma in grid(*SIGMAS, count)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of all blocks of each layer, from the dense Hessian in closed form."""
    depth, width = config["depth"], config["width"]
    draw, size = Draws(config["seed"]), 0.8 / math.sqrt(width)
    task = Addition()
    ids, labels = task.batch(SEQUENCES, seed=config["seed"])
    tokens, positions = draw(task.vocab, width), draw(task.context, width)
    x = config["sigma"] * (tokens[ids] + positions)
    weights = []
    for _ in range(depth):
        q, k, v = (draw(width, width, scale=size) for _ in range(3))
        weights.append((q, k, v))
    unembed = draw(width, task.vocab, scale=size)
    out = x
    for layer in weights:
        out = attention.forward(out, *layer, mask="causal", kind="linear")
    counted = (labels >= 0).to(x)[..., None]
    scale = 2 * counted / counted.sum(1, keepdim=True) / task.vocab  # the square loss of the answer's digits
    target = nn.functional.one_hot(labels.clamp(min=0), task.vocab).to(x)
    grad = scale * (out @ unembed - target) @ unembed.T
    curvature = scale[..., None] * (unembed @ unembed.T)
    H = attention.stack(x, weights, grad=grad, curvature=curvature, mask="causal", kind="linear")
    found: dict[str, list[list[float | str]]] = {}
    for letter in NAMES:
        found[letter] = []
        for number_ in range(1, depth + 1):
            blocks = [getattr(H, part)[f"{letter}{number_}"] for part in PARTS]
            hollow = number_ == depth  # the last layer's functional part is zero on the diagonal
            found[letter].append(
                [
                    0.0 if hollow and part == "functional" and not block.any() else sized(frobenius(block))
                    for part, block in zip(PARTS, blocks, strict=True)
                ]
            )
    return {"norms": found}


def report(records: Sequence[Record]) -> Report:
    """Powers of 3 to the depth."""
    panels = []
    for letter in ("V", "Q"):
        for depth in depths(records):
            power = exponents.predicted_depth(depth, depth)
            last = of_layer(records, depth, letter, depth, "total").curve("")
            middle = len(last.x) // 2
            curves = [
                of_layer(records, depth, letter, layer, "total").curve(f"layer {layer}", colour=layer - 1)
                for layer in range(1, depth + 1)
            ]
            guide = Slope(
                power or 0, (last.x[0], last.x[-1]), (last.x[middle], last.y[middle] / 30), rf"$\sigma^{{{power}}}$"
            )
            panels.append(
                Panel(curves, [guide], f"{NAMES[letter]}, depth {depth}", r"$\sigma$", r"$\|H\|_F$", "log", "log")
            )
    chart = Chart(
        "fig7",
        "Linear attention in depth over the size of the embeddings",
        f"Norms of the diagonal blocks of networks of linear attention, d = {records[0].config['width']}, square loss "
        f"over {SEQUENCES} sequences. Dashed grey: 2·3^depth, drawn a little below.",
        panels,
        columns=len(depths(records)),
    )
    numbers = []
    for depth in depths(records):
        numbers.append(of_layer(records, depth, "Q", depth, "total").slope(f"fig7 last layer depth {depth}", SIGMAS))
        if depth > 1:
            early = of_layer(records, depth, "Q", 1, "functional")
            for name, window in (("small", SMALL), ("large", LARGE), ("whole", (SIGMAS[0], LARGE[0]))):
                numbers.append(early.slope(f"fig7 earlier functional {name} depth {depth}", window))
    laws = tuple(
        of_layer(records, depth, letter, layer, "total").fitted(
            f"depth {depth}, layer {layer}: H({letter}, {letter})", exponents.predicted_depth(depth, layer)
        )
        for depth, layer in layers(records)
        for letter in ("Q", "V")
    )
    return Report((chart,), (_depth(records),), at_width(records, numbers), laws, marked(records))


def _depth(records: Sequence[Record]) -> Finding:
    """All blocks of all layers: the last one's at every σ, the others' from some σ on up to the largest."""
    parts: dict[str, bool | None] = {}
    texts = []
    for depth in depths(records):
        power = float(exponents.predicted_depth(depth, depth) or 0)
        top = {letter: of_layer(records, depth, letter, depth, "total") for letter in NAMES}
        everywhere = following((line, power) for line in top.values())
        parts[f"the last layer of {depth}"] = everywhere is not None and everywhere.whole
        texts.append(f"last layer of {depth}: {_slopes(top.values())} ({power:g})")
        if depth == 1:
            continue
        earlier = [of_layer(records, depth, letter, n, "total") for letter in NAMES for n in range(1, depth)]
        large = following((line, power) for line in earlier)
        parts[f"earlier layers of {depth}"] = large is not None and large.last
        small = [line.law(SMALL).slope for line in earlier]
        texts.append(
            f"earlier layers of {depth}: "
            + (f"within {LOCAL:g} of {power:g} for {large.said()}" if large else f"over no decade near {power:g}")
            + f", σ^{min(small):.2f} to σ^{max(small):.2f} for σ ≤ {SMALL[1]:g}, where 3^{depth} is {3**depth}"
        )
    return judged_parts(
        "depth-linear",
        f"Local slopes of the query, key and value blocks (predicted; tolerance {LOCAL:g}): " + "; ".join(texts) + ".",
        parts,
    )


def _slopes(lines: Iterable[Sweep]) -> str:
    """The smallest and the largest local slope of several curves."""
    found = [slope for line in lines for slope in line.finite().slopes()]
    return f"{min(found):.4f} to {max(found):.4f}" if found else "no numbers"


FIG7 = Experiment("fig7", "Linear attention in depth", f"{PAPER}, Figure 7", points, measure, report)
