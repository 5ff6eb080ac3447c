"""The published fits of Figures 6 and 7 again, from the authors' own networks: norms by products, with their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.linalg import frobenius
from curvlens.losses import CrossEntropy
from curvlens.operators import functional, hessian
from curvlens.papers import authors
from curvlens.papers.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.papers.first_paper.depths import depths
from curvlens.papers.first_paper.growth import SMALL
from curvlens.papers.first_paper.published import OTHER, networks, whole
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, farthest, sweep, where
from curvlens.problem import Problem
from curvlens.report.charts import Chart, Curve, Panel, Slope
from curvlens.study import Config, Record

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
        f"{networks(records)}; norms are from {SAMPLES} products each, {FEW} in Figure 7. Left: slopes of H_f(V) below "
        f"the top for σ ≤ {SMALL[1]:g}, the mean over the repeats of one line each; ± and bands are 95 % of the error "
        f"that the products leave, for these networks: {'; '.join(told)}. Right: linear attention, whose networks have "
        "no MLP, as the paper's text says, where the authors' notebook has one; grey: the powers 9 and 18, drawn a "
        f"little below. One line through σ from {linear[0].config['sigma']:.3g} to {linear[-1].config['sigma']:.3g}: "
        + ", ".join(f"{_told(fit)} (H({letter}))" for fit, letter in zip(fits, LETTERS, strict=True))
        + ".",
        [_panel_6(slopes), _panel_7(linear)],
    )
    if not whole(records, points(Effort())):
        return Report((chart,), notes=(OTHER,))
    few = [slope for depth, found in slopes.items() if depth <= MOST for slope in found]
    return Report((chart,), (), at_width(records, [farthest(few, 3), *fits]))


def _told(slope: Number) -> str:
    return f"{slope.value:.3f} ± {slope.error:.3f}"


def _panel_6(slopes: Mapping[int, Sequence[Number]]) -> Panel:
    """Slopes by layer, a curve for each depth."""
    layers = range(1, max(slopes))
    return Panel(
        [
            Curve(
                f"{depth} layers",
                list(range(1, depth)),
                [slope.value for slope in found],
                [slope.value - slope.error for slope in found],
                [slope.value + slope.error for slope in found],
                colour=colour,
            )
            for colour, (depth, found) in enumerate(slopes.items())
        ],
        (),
        "Figure 6: slope of $H_f(W_V, W_V)$",
        "layer",
        r"$d\,\log\|\cdot\|\,/\,d\,\log\sigma$",
        y_lines=(3.0,),
        ticks=(list(layers), [str(layer) for layer in layers]),
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
