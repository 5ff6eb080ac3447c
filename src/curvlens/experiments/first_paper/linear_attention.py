"""Figure 7: linear attention in depth, where every layer triples the power of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from curvlens.calculus import attention, exponents
from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.first_paper.depths import of_layer
from curvlens.experiments.parts import PARTS
from curvlens.experiments.sizes import frobenius, marked, sized
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel, Slope

SIGMAS = (0.01, 100.0)
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
    ids, labels = task.batch(16, seed=config["seed"])
    tokens, positions = draw(task.vocab, width), draw(task.context, width)
    x = config["sigma"] * (tokens[ids] + positions)
    layers = []
    for _ in range(depth):
        q, k, v = (draw(width, width, scale=size) for _ in range(3))
        layers.append((q, k, v))
    unembed = draw(width, task.vocab, scale=size)
    out = x
    for layer in layers:
        out = attention.forward(out, *layer, mask="causal", kind="linear")
    counted = (labels >= 0).to(x)[..., None]
    scale = 2 * counted / counted.sum(1, keepdim=True) / task.vocab  # the square loss of the answer's digits
    target = nn.functional.one_hot(labels.clamp(min=0), task.vocab).to(x)
    grad = scale * (out @ unembed - target) @ unembed.T
    curvature = scale[..., None] * (unembed @ unembed.T)
    H = attention.stack(x, layers, grad=grad, curvature=curvature, mask="causal", kind="linear")
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
        for depth in (1, 2, 3):
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
        "Linear attention: the power of the data triples with every layer",
        "Norms of the diagonal blocks of networks of linear attention, square loss. Dashed grey: 2·3^depth, drawn a "
        "little below. The last layer follows it at any σ; earlier ones have half that power for small σ, where the "
        "residual is constant.",
        panels,
        columns=3,
    )
    numbers, texts, good = [], [], True
    for depth in (1, 2, 3):
        found = of_layer(records, depth, "Q", depth, "total").slope(f"fig7 last layer depth {depth}", SIGMAS)
        numbers.append(found)
        good = good and abs(found.value - 2 * 3**depth) < 1e-3
        texts.append(f"depth {depth}: {found.value:.4f}")
    for depth in (2, 3):
        early = of_layer(records, depth, "Q", 1, "functional")
        small, large = early.law((SIGMAS[0], 0.1)), early.law((10.0, SIGMAS[1]))
        numbers.append(Number(f"fig7 earlier functional small depth {depth}", small.slope, 0.0))
        numbers.append(Number(f"fig7 earlier functional large depth {depth}", large.slope, 0.0))
        texts.append(f"first layer's H_f at depth {depth}: {small.slope:.2f} for σ ≤ 0.1, {large.slope:.2f} for σ ≥ 10")
    finding = Finding(
        "depth-linear",
        "holds when" if good else "does not hold",
        "Slopes of the last layer over all σ: " + "; ".join(texts) + ".",
        "the last layer at any σ; earlier layers beyond σ ≈ 1, below it they have 3^D",
    )
    laws = tuple(
        of_layer(records, depth, letter, layer, "total").fitted(
            f"depth {depth}, layer {layer}: H({letter}, {letter})", exponents.predicted_depth(depth, layer)
        )
        for depth in (1, 2, 3)
        for layer in range(1, depth + 1)
        for letter in ("Q", "V")
    )
    return Report((chart,), (finding,), tuple(numbers), laws, marked(records))


FIG7 = Experiment("fig7", "Linear attention in depth", f"{PAPER}, Figure 7", points, measure, report)
