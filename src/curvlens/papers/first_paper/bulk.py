"""Appendix D: whether the T-functional part makes the bulk of the query-key spectrum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.comparisons import DOMINATES
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.first_paper.growth import WHOLE
from curvlens.papers.first_paper.layer import LENGTH, WIDTH
from curvlens.papers.ranges import Range, told, widest
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, mean, sweep, where
from curvlens.papers.verdicts import Finding, all_of, judged
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

BULK = 0.9
"""The share of all eigenvalues, from the smallest absolute value on, that is called the bulk."""
HALF = 0.5
"""A narrower bulk, told beside."""
KEYS = (2, 8, 16)
"""Sizes of the keys: below, at and above the width of the tokens."""


def points(effort: Effort) -> list[Config]:
    """Tokens of all sizes, keys narrower and wider than they are."""
    return [
        {"d_k": d_k, "sigma": sigma, "seed": seed}
        for d_k in KEYS
        for seed in effort.repeats(5, 20)
        for sigma in grid(*WHOLE, 7 if effort.quick else 13)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The share of the T-functional part in the eigenvalues of the query-key Hessian, in the bulk and outside."""
    outer, functional = parts(config)
    values, vectors = torch.linalg.eigh(outer + functional)
    by_functional = (vectors * (functional @ vectors)).sum(0)  # uᵀ T-functional u; with T-outer's it is λ
    order = values.abs().argsort()
    cut, half = (int(share * len(values)) for share in (BULK, HALF))
    pairs = torch.linalg.eigvalsh(functional)
    return {
        "bulk": _share(values, by_functional, order[:cut]),
        "half": _share(values, by_functional, order[:half]),
        "outliers": _share(values, by_functional, order[cut:]),
        "inside": float((values.abs() <= pairs.abs().max()).double().mean()),
        "rank": int(torch.linalg.matrix_rank(outer, hermitian=True, rtol=1e-11)) / len(values),
    }


def parts(config: Config) -> tuple[Tensor, Tensor]:
    """The T-outer and the T-functional part of a layer of Gaussian tokens with square loss, dense."""
    tokens, own = Draws(config["seed"], "tokens"), Draws(config["seed"], "weights")
    x, y = config["sigma"] * tokens(LENGTH, WIDTH), Draws(config["seed"], "targets")(LENGTH, WIDTH)
    wq, wk = (own(WIDTH, config["d_k"], scale=1 / math.sqrt(WIDTH)) for _ in range(2))
    H = attention.hessian(x, wq, wk, own(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)), target=y)
    return H.t_outer().dense(), H.t_functional().dense()


def _share(values: Tensor, by_functional: Tensor, of: Tensor) -> float:
    """Σ λ uᵀFu / Σ λ² over some eigenvectors u: with the share of the other part it makes 1."""
    return float((values[of] * by_functional[of]).sum() / values[of].square().sum())


def report(records: Sequence[Record]) -> Report:
    """The shares over the size of the tokens."""
    sizes = sorted({record.config["d_k"] for record in records})
    panels = []
    for name, title in (("bulk", f"the lower {BULK:.0%}"), ("outliers", f"the upper {1 - BULK:.0%}")):
        curves = [
            _plain(sweep(where(records, d_k=d_k), "sigma", name), f"$d_K = {d_k}$", i) for i, d_k in enumerate(sizes)
        ]
        panels.append(Panel(curves, (), title, r"$\sigma$", "share of the T-functional part", "log", y_lines=(0, 1)))
    chart = Chart(
        "bulk",
        "Which part makes the bulk of the query-key spectrum",
        f"One layer with {LENGTH} Gaussian tokens of {WIDTH} dimensions with standard deviation σ and targets of size "
        "1. The share that the T-functional part has in the eigenvalues of the query-key Hessian, Σ λ uᵀFu / Σ λ² over "
        "eigenvectors u; the T-outer part has the rest. Left: the bulk. Right: the eigenvalues of the largest absolute "
        "value. Means over the seeds with their 95 % intervals.",
        panels,
    )
    return Report((chart,), (_bulk(records, sizes),))


def _plain(line: Sweep, label: str, colour: int) -> Curve:
    """The mean and its interval; a share may be below 0 or above 1 where the parts have opposite signs."""
    found = [mean("", column.tolist()) for column in line.values.T]
    low, high = ([each.value + sign * each.error for each in found] for sign in (-1, 1))
    return Curve(label, line.x, [each.value for each in found], low, high, colour=colour)


def _bulk(records: Sequence[Record], sizes: Sequence[int]) -> Finding:
    """Where the T-functional part's share dominates in the bulk, for every size of the keys."""
    least = DOMINATES / (1 + DOMINATES)
    ranges: dict[int, Range | None] = {}
    texts: list[str] = []
    known: list[bool | None] = []
    for d_k in sizes:
        of = where(records, d_k=d_k)
        line = sweep(of, "sigma", "bulk")
        found = [mean("", column.tolist()) for column in line.values.T]
        known += [_above(each, least) for each in found]
        good = [_above(each, least) is True for each in found]
        ranges[d_k] = widest(line.x, [a and b for a, b in pairwise(good)])
        places = [_nearest(line.x, sigma) for sigma in (0.1, 1.0, 10.0)]
        said = ", ".join(f"{found[i].value:.2f} ± {found[i].error:.2f} (σ = {line.x[i]:.2g})" for i in places)
        beside = "; ".join(
            f"{name} " + ", ".join(f"{float(sweep(of, 'sigma', key).values[:, i].mean()):.2f}" for i in places)
            for key, name in (("half", f"the lower {HALF:.0%}"), ("outliers", "the others"))
        )
        rank = float(sweep(of, "sigma", "rank").values.mean())
        inside = float(sweep(of, "sigma", "inside").values[:, places[1]].mean())
        texts.append(
            f"d_K = {d_k}: {said}; {beside}; T-outer has {rank:.0%} of the full rank, and at σ = "
            f"{line.x[places[1]]:.2g} {inside:.0%} of all eigenvalues are within the range of T-functional's; share "
            f"above {least:.2f} for {told(ranges[d_k])}"
        )
    when = "; ".join(f"d_K = {d_k}: {found.said()}" for d_k, found in ranges.items() if found is not None)
    return judged(
        "t-bulk",
        f"Share of the T-functional part in the {BULK:.0%} of the eigenvalues with the smallest absolute values "
        f"(Σ λ uᵀFu / Σ λ² over their eigenvectors u; the T-outer part has the rest): {'. '.join(texts)}. It is "
        f"responsible for them if its share is {DOMINATES:g} times the other's.",
        holds=all_of(known),
        when=when,
    )


def _nearest(x: Sequence[float], place: float) -> int:
    """Where on a grid a place is."""
    return min(range(len(x)), key=lambda i: abs(math.log(x[i] / place)))


def _above(share: Number, least: float) -> bool | None:
    """Whether a mean is above a bound; None if its interval does not tell."""
    if share.value - share.error > least:
        return True
    return False if share.value + share.error <= least else None


BULK_SPECTRUM = Experiment(
    "bulk", "The bulk of the query-key spectrum", f"{PAPER}, Appendix D", points, measure, report
)
