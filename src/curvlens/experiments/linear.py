"""Figures 7 and 8 and Table 1: linear attention, linear MLPs and a linear CNN, and how depth multiplies the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.calculus import attention, exponents, linear_mlp
from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.growth import PARTS, SIGNS, grid
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, marked, sized, sweep
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel, Slope
from curvlens.losses import MSE
from curvlens.operators import functional, ggn
from curvlens.problem import Problem

PAPER = "What does it mean to be a Transformer?"
SIGMAS_7 = (0.01, 100.0)
NAMES = {"Q": "query", "K": "key", "V": "value"}


def points_7(effort: Effort) -> list[Config]:
    """One to three layers of linear attention."""
    count, width = (9, 6) if effort.quick else (25, 12)
    return [
        {"depth": depth, "width": width, "sigma": sigma, "seed": seed}
        for depth in (1, 2, 3)
        for seed in effort.repeats(3, 10)
        for sigma in grid(*SIGMAS_7, count)
    ]


def measure_7(config: Config) -> Mapping[str, Any]:
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
                    0.0 if hollow and part == "functional" and not block.any() else sized(_norm(block))
                    for part, block in zip(PARTS, blocks, strict=True)
                ]
            )
    return {"norms": found}


def _norm(block: Tensor) -> float:
    """The Frobenius norm; entries are scaled first, so that no square leaves float64."""
    largest = float(block.abs().max())
    return largest * float((block / largest).norm()) if largest else 0.0


def _line(records: Sequence[Record], depth: int, letter: str, layer: int, part: str) -> Sweep:
    of = [record for record in records if record.config["depth"] == depth]
    return sweep(of, "sigma", "norms", letter, layer - 1, PARTS.index(part))


def report_7(records: Sequence[Record]) -> Report:
    """Powers of 3 to the depth."""
    panels = []
    for letter in ("V", "Q"):
        for depth in (1, 2, 3):
            power = exponents.predicted_depth(depth, depth)
            last = _line(records, depth, letter, depth, "total").curve("")
            middle = len(last.x) // 2
            curves = [
                _line(records, depth, letter, layer, "total").curve(f"layer {layer}", colour=layer - 1)
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
        found = _line(records, depth, "Q", depth, "total").slope(f"fig7 last layer depth {depth}", SIGMAS_7)
        numbers.append(found)
        good = good and abs(found.value - 2 * 3**depth) < 1e-3
        texts.append(f"depth {depth}: {found.value:.4f}")
    for depth in (2, 3):
        early = _line(records, depth, "Q", 1, "functional")
        small, large = early.law((SIGMAS_7[0], 0.1)), early.law((10.0, SIGMAS_7[1]))
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
        _line(records, depth, letter, layer, "total").fitted(
            f"depth {depth}, layer {layer}: H({letter}, {letter})", exponents.predicted_depth(depth, layer)
        )
        for depth in (1, 2, 3)
        for layer in range(1, depth + 1)
        for letter in ("Q", "V")
    )
    return Report((chart,), (finding,), tuple(numbers), laws, marked(records))


def points_8(effort: Effort) -> list[Config]:
    """Linear MLPs of one to five layers."""
    count, width = (6, 32) if effort.quick else (13, 128)
    return [
        {"depth": depth, "width": width, "sigma": sigma, "seed": seed}
        for depth in (1, 2, 3, 4, 5)
        for seed in effort.repeats(3, 10)
        for sigma in grid(0.01, 10, count)
    ]


def measure_8(config: Config) -> Mapping[str, Any]:
    """The norms of the diagonal blocks, and the largest of the functional part, which are zero."""
    depth, width = config["depth"], config["width"]
    draw = Draws(config["seed"])
    task = Addition()
    ids, labels = task.batch(64, seed=config["seed"])
    x = config["sigma"] * draw(task.vocab, width)[ids]
    sizes = [width] * depth + [task.vocab]
    weights = [draw(b, a, scale=0.8 / math.sqrt(a)) for a, b in pairwise(sizes)]
    counted = labels >= 0
    target = nn.functional.one_hot(labels[counted], task.vocab).to(x)
    H = linear_mlp.hessian(x[counted], weights, target)
    names = [f"W{i + 1}" for i in range(depth)]
    return {
        "norms": [sized(H.total.norm(name)) for name in names],
        "functional": max(H.functional.norm(name) for name in names),
    }


def report_8(records: Sequence[Record]) -> Report:
    """2 at any depth."""
    panels, slopes = [], []
    for depth in (1, 2, 3, 4, 5):
        of = [record for record in records if record.config["depth"] == depth]
        lines = [sweep(of, "sigma", "norms", i) for i in range(depth)]
        slopes += [line.law((0.01, 10)).slope for line in lines]
        first = lines[0].curve("")
        guide = Slope(2, (first.x[0], first.x[-1]), (first.x[0], first.y[0] / 4), r"$\sigma^2$")
        curves = [line.curve(f"layer {i + 1}", colour=i) for i, line in enumerate(lines)]
        panels.append(Panel(curves, [guide], f"depth {depth}", r"$\sigma$", r"$\|H\|_F$", "log", "log"))
    worst = max(slopes, key=lambda slope: abs(slope - 2))
    hollow = max(record.result["functional"] for record in records)
    chart = Chart(
        "fig8",
        "Linear MLP: σ² at any depth",
        "Norms of the diagonal blocks of linear MLPs, square loss. Dashed grey: σ², drawn a little below.",
        panels,
        columns=3,
    )
    finding = Finding(
        "depth-mlp",
        "holds" if abs(worst - 2) < 1e-6 else "does not hold",
        f"Of all depths and layers the slope farthest from 2 is {worst:.6f}; the functional part of the diagonal "
        f"blocks is {hollow:g}.",
    )
    return Report((chart,), (finding,), (Number("fig8 slope", worst, 0.0),), (), marked(records))


def points_table1(effort: Effort) -> list[Config]:
    """Three linear networks: attention, an MLP and a CNN, of two layers, with a residual that is constant or scales."""
    return [
        {"network": network, "residual": residual, "sigma": sigma, "seed": seed}
        for network in ("attention", "mlp", "cnn")
        for residual in ("constant", "scaling")
        for seed in effort.repeats(3, 10)
        for sigma in grid(0.001, 0.1, 5 if effort.quick else 9)
    ]


def measure_table1(config: Config) -> Mapping[str, Any]:
    """‖H_o‖ and ‖H_f‖ over all weights of the network; target scales with the data or does not."""
    draw = Draws(config["seed"])
    x, y = config["sigma"] * draw(4, 9, 6), draw(4, 9, 6)
    y = y * config["sigma"] if config["residual"] == "scaling" else y
    if config["network"] == "attention":
        form = attention.hessian(x, 0.4 * draw(6, 6), 0.4 * draw(6, 6), 0.4 * draw(6, 6), target=y, kind="linear")
        return {part: sized(form.norm(None, part)) for part in PARTS[:2]}
    if config["network"] == "mlp":
        dense = linear_mlp.hessian(x, [0.4 * draw(6, 6), 0.4 * draw(6, 6)], y)
        return {part: sized(getattr(dense, part).norm()) for part in PARTS[:2]}
    cnn = nn.Sequential(nn.Conv1d(9, 9, 3, padding=1, bias=False), nn.Conv1d(9, 9, 3, padding=1, bias=False)).double()
    with torch.no_grad():
        for weight in cnn.parameters():
            weight.copy_(0.2 * draw(*weight.shape))
    problem = Problem(cnn, [(x, y)], MSE())
    return {"outer": sized(_norm(ggn(problem).dense())), "functional": sized(_norm(functional(problem).dense()))}


def report_table1(records: Sequence[Record]) -> Report:
    """Powers of the data in both parts, against those of Σ = XᵀX/L and Ω = Xᵀ(F − Y)/L."""
    predicted = {
        ("attention", "constant"): (6, 3),  # Σ³ and Ω Σ
        ("attention", "scaling"): (6, 4),
        ("mlp", "constant"): (2, 1),  # Σ and Ω
        ("mlp", "scaling"): (2, 2),
    }
    slopes: dict[tuple[str, str], tuple[float, ...]] = {}
    for network in NETWORKS:
        for residual in ("constant", "scaling"):
            of = [r for r in records if r.config["network"] == network and r.config["residual"] == residual]
            lines = [sweep(of, "sigma", part) for part in PARTS[:2]]
            slopes[network, residual] = tuple(line.law((0.001, 0.01)).slope for line in lines)
    worst = max(abs(a - b) for case in predicted for a, b in zip(slopes[case], predicted[case], strict=True))
    apart = max(
        abs(a - b) for r in ("constant", "scaling") for a, b in zip(slopes["cnn", r], slopes["mlp", r], strict=True)
    )
    bars = []
    for colour, part in enumerate(PARTS[:2]):
        powers = [found[colour] for found in slopes.values()]
        bars.append(Curve(f"${SIGNS[part]}$", list(range(len(powers))), powers, colour=colour, style="bars"))
    names = [
        f"{NETWORKS[network]}\n{residual}\nresidual".replace("linear ", "linear\n") for network, residual in slopes
    ]
    chart = Chart(
        "table1",
        "Powers of the data in the Hessian of linear networks",
        "Slopes of the norms of both parts over σ, σ ≤ 0.01: one layer of linear attention, an MLP and a CNN of two "
        "layers; with targets that do not scale with the data (constant residual) and ones that do.",
        [Panel(bars, y_label="power of σ", ticks=(list(range(len(slopes))), names))],
        columns=1,
    )

    def told(network: str) -> str:
        (a, b), (c, d) = slopes[network, "constant"], slopes[network, "scaling"]
        return f"{NETWORKS[network]}: H_o {a:.3f}, H_f {b:.3f}; with targets that scale {c:.3f} and {d:.3f}"

    findings = (
        Finding("table-1", "holds" if worst < 0.02 else "does not hold", f"{told('attention')}. {told('mlp')}."),
        Finding("cnn", "holds" if apart < 0.02 else "does not hold", f"{told('cnn')}."),
    )
    return Report((chart,), findings, (), (), marked(records))


NETWORKS = {"attention": "linear attention", "mlp": "linear MLP", "cnn": "linear CNN"}
FIG7 = Experiment("fig7", "Linear attention in depth", f"{PAPER}, Figure 7", points_7, measure_7, report_7)
FIG8 = Experiment("fig8", "Linear MLPs in depth", f"{PAPER}, Figure 8", points_8, measure_8, report_8)
TABLE1 = Experiment(
    "table1",
    "Linear attention beside a linear MLP and CNN",
    f"{PAPER}, Table 1",
    points_table1,
    measure_table1,
    report_table1,
)
