"""Whether softmax couples the tokens: the blocks of two tokens' states, with softmax, with less of it and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvlens.papers.comparisons import ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, grid, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

LENGTH, WIDTH = 8, 6
KINDS = {
    "softmax": "softmax",
    "held": "softmax, attention held",
    "linear": "linear, no softmax",
    "uniform": "uniform",
}
"""Attention that is computed, softmax's that is a constant, scores over L without softmax, and 1/L everywhere."""
ALIKE = 1.01
"""Largest over smallest norm below which all pairs of tokens are coupled alike."""


def points(effort: Effort) -> list[Config]:
    """Tokens from nearly even attention to saturated attention."""
    return [
        {"kind": kind, "sigma": sigma, "seed": seed}
        for kind in KINDS
        for seed in effort.repeats(5, 20)
        for sigma in grid(0.1, 10, 5 if effort.quick else 9)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Blocks H(x_i, x_j) of two tokens beside those of one: norms over all, and how the pairs differ."""
    x, loss = network(config)
    H = hessian(loss, x)
    blocks = H.view(LENGTH, WIDTH, LENGTH, WIDTH).square().sum((1, 3)).sqrt()
    own = blocks.diagonal()
    pairs = (blocks / (own[:, None] * own[None]).sqrt())[torch.triu_indices(LENGTH, LENGTH, 1).unbind()]
    return {
        "beside": float(torch.sqrt(blocks.square().sum() - own.square().sum())),
        "own": float(own.norm()),
        "coupling": float(pairs.mean()),
        "uneven": float(blocks.max() / blocks.min()),
    }


def network(config: Config) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Tokens, and the mean square of a layer's outputs beside targets as a function of them."""
    own, sigma = Draws(config["seed"], "weights"), config["sigma"]
    x = sigma * Draws(config["seed"], "tokens")(LENGTH, WIDTH)
    y = Draws(config["seed"], "targets")(LENGTH, WIDTH)
    q, k, v = (own(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3))

    def scores(tokens: Tensor) -> Tensor:
        return tokens @ q @ k.mT @ tokens.mT / math.sqrt(WIDTH)

    held = scores(x).softmax(-1)
    attended: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda tokens: scores(tokens).softmax(-1),
        "held": lambda tokens: held,
        "linear": lambda tokens: scores(tokens) / LENGTH,
        "uniform": lambda tokens: torch.full_like(held, 1 / LENGTH),
    }

    def loss(tokens: Tensor) -> Tensor:
        return (attended[config["kind"]](tokens) @ tokens @ v - y).square().mean()

    return x, loss


def hessian(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂²ℓ/∂X², token by token, by automatic differentiation."""
    found: Tensor = torch.autograd.functional.hessian(loss, x)  # type: ignore[no-untyped-call]
    return found.reshape(x.numel(), x.numel())


def report(records: Sequence[Record]) -> Report:
    """The coupling of tokens over their size, for all kinds of attention."""
    lines = {kind: sweep(where(records, kind=kind), "sigma", "coupling") for kind in KINDS}
    uneven = {kind: sweep(where(records, kind=kind), "sigma", "uneven") for kind in KINDS}
    chart = Chart(
        "tokens",
        "How attention couples the tokens",
        f"Second derivatives of the square loss behind one attention layer by the states of its {LENGTH} tokens, "
        "Gaussian with standard deviation σ. Left: the norm of the block of two tokens over the geometric mean of "
        "their own blocks' norms, mean over all pairs. Right: the largest norm of a block over the smallest.",
        [
            _panel(lines, "coupling of two tokens", r"$\|H_{ij}\| / \sqrt{\|H_{ii}\|\|H_{jj}\|}$"),
            _panel(uneven, "how uneven the blocks are", r"$\max \|H_{ij}\| / \min \|H_{ij}\|$"),
        ],
    )
    return Report((chart,), (_couples(records, lines, uneven),))


def _panel(lines: Mapping[str, Sweep], title: str, label: str) -> Panel:
    curves = [line.curve(KINDS[kind], colour=i) for i, (kind, line) in enumerate(lines.items())]
    return Panel(curves, (), title, r"$\sigma$", label, "log", "log")


def _couples(records: Sequence[Record], lines: Mapping[str, Sweep], uneven: Mapping[str, Sweep]) -> Finding:
    """At tokens of size 1, where scores are of size 1: more than without softmax's derivative, and by the data."""
    sigma = min(lines["softmax"].x, key=lambda place: abs(math.log(place)))
    at = lines["softmax"].x.index(sigma)
    over = {kind: ratio(lines["softmax"].values[:, at], lines[kind].values[:, at]) for kind in KINDS}
    sizes = {kind: float(line.middle()[at]) for kind, line in lines.items()}
    spread = {kind: ratio(line.values[:, at], line.values[:, at].new_ones(())) for kind, line in uneven.items()}
    ends = [
        f"{ratio(lines['softmax'].values[:, i], lines['held'].values[:, i])} (σ = {lines['softmax'].x[i]:.2g})"
        for i in (0, -1)
    ]
    beside = sweep(where(records, kind="softmax"), "sigma", "beside").values[:, at]
    own = sweep(where(records, kind="softmax"), "sigma", "own").values[:, at]
    falls = all(a > b for a, b in pairwise(lines["softmax"].middle().tolist()))
    text = (
        f"Norm of the block of two tokens over the geometric mean of their own blocks', at σ = {sigma:.2g}: "
        + ", ".join(f"{KINDS[kind]} {size:.3g}" for kind, size in sizes.items())
        + ". Softmax over the others: "
        + "; ".join(f"{KINDS[kind]} {found}" for kind, found in over.items() if kind != "softmax")
        + f". Over attention held at the ends: {', '.join(ends)}. All blocks off the diagonal together over those on "
        f"it with softmax: {ratio(beside, own)}. Largest over smallest block: "
        + "; ".join(f"{KINDS[kind]} {found.value:.3g}" for kind, found in spread.items())
        + f" (alike is below {ALIKE:g}). "
        + ("The coupling falls as tokens grow." if falls else "The coupling does not fall with every step of σ.")
    )
    data = spread["softmax"].above(ALIKE)
    fixed = spread["uniform"].below(ALIKE)
    return judged_parts(
        "softmax-couples",
        text,
        {
            "the derivative of softmax adds to the coupling that mixing tokens makes": over["held"].above(),
            "more coupling than without softmax": over["linear"].above(),
            "more coupling than uniform attention": over["uniform"].above(),
            "the coupling depends on the data, that of uniform attention does not": data and fixed,
        },
    )


TOKENS = Experiment("tokens", "Coupling of the tokens", f"{ARTICLE}, Section 5.4", points, measure, report)
