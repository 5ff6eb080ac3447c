"""The published fits of Figures 6 and 7 again, from the authors' own networks: norms by products, with their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.experiments import authors
from curvlens.experiments.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.experiments.first_paper.depths import depths
from curvlens.experiments.first_paper.growth import SMALL
from curvlens.experiments.first_paper.published import whole
from curvlens.experiments.records import Config, Record
from curvlens.experiments.sources import PAPER
from curvlens.experiments.sweeps import Sweep, farthest, sweep, where
from curvlens.figures.charts import Chart, Panel, Slope
from curvlens.linalg import frobenius
from curvlens.losses import CrossEntropy
from curvlens.operators import functional, hessian
from curvlens.problem import Problem

SAMPLES = 12
"""Products for a norm: the largest eigenvalues are found first, so that its error is a few parts in a hundred."""
FEW = 6
"""The same for Figure 7, whose slopes are given to a tenth."""
DEPTHS = (5, 4, 3, 2)
MOST = 4
"""Up to which depth published slopes of Figure 6 are compared: they are not those of five layers."""
LETTERS = {"Q": "q", "V": "v"}


def points(effort: Effort) -> list[Config]:
    """Figure 6 for σ ≤ 0.1, and the networks of two layers of Figure 7."""
    softmax = [(place, sigma) for place, sigma in enumerate(authors.SIGMAS) if sigma <= SMALL[1]]
    linear = list(enumerate(authors.SHORT))
    if effort.quick:
        cases = [("softmax", 2, softmax[::3]), ("linear", 2, linear[::7])]
    else:
        cases = [*(("softmax", depth, softmax) for depth in DEPTHS), ("linear", 2, linear)]
    return [
        {"kind": kind, "depth": depth, "width": authors.WIDTH, "sigma": sigma, "place": place, "seed": seed}
        for kind, depth, places in cases
        for seed in effort.repeats(1, authors.REPEATS)
        for place, sigma in places
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms with their standard errors, of every layer below the top.

    With softmax ‖H_f‖ of the value; in linear attention without MLPs and skips ‖H‖ of query and value.
    """
    linear = config["kind"] == "linear"
    network = authors.network(config["seed"], config["depth"], mlp=not linear)
    tables = authors.embeddings(config["seed"], config["place"], config["sigma"])
    letters = tuple(LETTERS) if linear else ("V",)
    problem = Problem(
        authors.gpt(network, tables, linear=linear),
        authors.batch(),
        _square if linear else CrossEntropy(),
        params=[f"h.*.attn.{LETTERS[letter]}.weight" for letter in letters],
    )
    operator, samples = (hessian(problem), FEW) if linear else (functional(problem), SAMPLES)
    return {
        "norms": {
            letter: [
                _norm(operator[f"h.{layer}.attn.{LETTERS[letter]}"], samples) for layer in range(config["depth"] - 1)
            ]
            for letter in letters
        }
    }


def _norm(block: Any, samples: int) -> list[float]:
    found = frobenius(block, samples=samples, seed=0)
    return [float(found.value), float(found.stderr)]


def _square(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The authors' square loss: where the answer is predicted, against the token that is there."""
    ids, labels = batch
    counted = labels >= 0
    target = nn.functional.one_hot(ids[counted], outputs.shape[-1]).to(outputs)
    return (outputs[counted] - target).square().sum(), int(counted.sum())


def _line(records: Sequence[Record], letter: str, layer: int, entry: int = 0) -> Sweep:
    return sweep(records, "sigma", "norms", letter, layer - 1, entry)


def _slope(name: str, records: Sequence[Record], letter: str, layer: int) -> Number:
    """The mean slope over the repeats; its error is that of the random probes, since the networks are the same."""
    found, errors = (_line(records, letter, layer, entry) for entry in (0, 1))
    x = torch.tensor(found.x, dtype=torch.float64).log()
    centred = x - x.mean()
    error = float((centred * errors.values / found.values).norm() / centred.square().sum()) / len(found.values)
    ends = found.x[0], found.x[-1]
    return Number(f"{name}, published networks", float(found.powers(ends).mean()), 1.96 * error, ends)


def report(records: Sequence[Record]) -> Report:
    """The slopes of Figure 6 by depth and layer, and those of Figure 7."""
    softmax, linear = where(records, kind="softmax"), where(records, kind="linear")
    deep = {depth: where(softmax, depth=depth) for depth in depths(softmax)}
    slopes = {
        depth: [_slope("fig6 V functional small below the top", of, "V", layer) for layer in range(1, depth)]
        for depth, of in deep.items()
    }
    fits = [_slope(f"fig7 {letter} total first of two", linear, letter, 1) for letter in LETTERS]
    told = [f"{', '.join(map(_told, found))} (depth {depth})" for depth, found in slopes.items()]
    chart = Chart(
        "published-deep",
        "The networks of the published Figures 6 and 7",
        f"Norms of the networks that the authors measured, d = {authors.WIDTH}, drawn again from their seeds; from "
        f"{SAMPLES} products each, {FEW} in Figure 7. Slopes of H_f(V) below the top for σ ≤ {SMALL[1]:g}, the mean "
        f"over the repeats with the error that the products leave: {'; '.join(told)}. Figure 7, one "
        f"line through σ from {linear[0].config['sigma']:g} to {linear[-1].config['sigma']:g}: "
        + ", ".join(f"{_told(fit)} (H({letter}))" for fit, letter in zip(fits, LETTERS, strict=True))
        + ".",
        [*(_panel_6(of, depth) for depth, of in deep.items()), _panel_7(linear)],
        columns=3,
    )
    few = [slope for depth, found in slopes.items() if depth <= MOST for slope in found]
    return Report((chart,), (), at_width(records, [farthest(few, 3), *fits] if whole(records) else ()))


def _told(slope: Number) -> str:
    return f"{slope.value:.3f} ± {slope.error:.3f}"


def _panel_6(records: Sequence[Record], depth: int) -> Panel:
    curves = [_line(records, "V", n).curve(f"layer {n}", colour=n - 1) for n in range(1, depth)]
    x, y = curves[0].x, curves[0].y
    return Panel(
        curves,
        [Slope(3, (x[0], x[-1]), (x[0], y[0] / 3), r"$\sigma^3$")],
        f"Figure 6, depth {depth}",
        r"$\sigma$",
        r"$\|H_f(W_V, W_V)\|_F$",
        "log",
        "log",
    )


def _panel_7(records: Sequence[Record]) -> Panel:
    curves = [
        _line(records, letter, 1).curve(rf"$\|H(W_{letter}, W_{letter})\|_F$", colour=colour)
        for colour, letter in enumerate(LETTERS)
    ]
    x, y = curves[0].x, curves[0].y
    return Panel(
        curves,
        [
            Slope(9, (x[0], x[-1] / 2), (x[0], y[0] / 5), r"$\sigma^9$"),
            Slope(18, (2 * x[0], x[-1]), (x[-1], y[-1] / 5), r"$\sigma^{18}$"),
        ],
        "Figure 7, first of two layers",
        r"$\sigma$",
        "Frobenius norm",
        "log",
        "log",
    )


PUBLISHED_DEEP = Experiment(
    "published-deep",
    "The published networks of Figures 6 and 7",
    f"{PAPER}, the authors' notebook",
    points,
    measure,
    report,
)
