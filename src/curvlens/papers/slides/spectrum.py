"""The whole spectrum of scalar attention in closed form: a bulk of pairs and three others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import scalar_attention
from curvlens.papers.comparisons import ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.sizes import marked
from curvlens.papers.slides.scalar_layer import scalar_layer
from curvlens.papers.slides.sensitivity import changes
from curvlens.papers.sources import SLIDES
from curvlens.papers.sweeps import Sweep, grid, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

EXACT = 1e-10
"""Of the largest eigenvalue: eigenvalues that are closer are the same but for rounding."""
OUTSIDE = 3.0
"""So many times the bulk, an eigenvalue lies far outside it."""
CONDITION = 10.0
"""The factor by which the condition number has to change between the ends of the grid, where norms change 100 times."""


def points(effort: Effort) -> list[Config]:
    """Norms of the query and key weights from 0.1 to 10."""
    return [
        {"d_k": d_k, "size": size, "seed": seed}
        for d_k in (2, 8, 32)
        for seed in effort.repeats(5, 20)
        for size in grid(0.1, 10, 7 if effort.quick else 13)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The closed form, and how far it is from the eigenvalues of a matrix of second derivatives."""
    x, q, k, v, y = scalar_layer(config["seed"], config["d_k"], config["size"])
    found = scalar_attention.spectrum(x, q, k, v, y)
    values = torch.linalg.eigvalsh(_differentiated(x, q, k, v, y))
    return {
        "bulk": found.bulk.value,
        "outliers": found.outliers.tolist(),
        "ggn": found.ggn_outliers.tolist(),
        "condition": found.condition,
        "apart": float((values - found.eigenvalues).abs().max() / values.abs().max()),
        "multiplicity": found.bulk.multiplicity,
    }


def _differentiated(x: Tensor, q: Tensor, k: Tensor, v: float, y: Tensor) -> Tensor:
    """The Hessian by (w_Q, w_K, w_V), by automatic differentiation."""
    d_k = len(q)

    def loss(theta: Tensor) -> Tensor:
        wq, wk, wv = theta[:d_k], theta[d_k:-1], theta[-1]
        a = ((wq @ wk / math.sqrt(d_k)) * x[:, :, None] * x[:, None, :]).softmax(-1)
        return (wv * (a @ x[..., None]).squeeze(-1) - y).square().mean()

    theta = torch.cat([q, k, torch.tensor([v], dtype=x.dtype)])
    found: Tensor = torch.autograd.functional.hessian(loss, theta)  # type: ignore[no-untyped-call]
    return found


def report(records: Sequence[Record]) -> Report:
    """Bulk, outliers and condition number over the norm of the weights."""
    conditions, ratios = [], []
    for colour, d_k in enumerate(_key_sizes(records)):
        of = where(records, d_k=d_k)
        conditions.append(sweep(of, "size", "condition").curve(f"$d_K = {d_k}$", colour=colour))
        bulk, top = sweep(of, "size", "bulk"), sweep(of, "size", "outliers", 2)
        ratios.append(Sweep(bulk.x, top.values / bulk.values).curve(f"$d_K = {d_k}$", colour=colour))
    label = r"norm of $w_Q$ and of $w_K$"
    chart = Chart(
        "scalar",
        "Scalar attention: the spectrum in closed form",
        "Attention with scalar tokens and values and query and key weights in d_K dimensions. Left: the condition "
        "number of the Hessian. Right: the largest eigenvalue over the size of the bulk.",
        [
            Panel(conditions, (), "condition number", label, r"$\max|\lambda| / \min|\lambda|$", "log", "log"),
            Panel(ratios, (), "largest outlier over the bulk", label, r"$\lambda_{\max} / |\mu|$", "log", "log"),
        ],
    )
    return Report((chart,), (_bulk(records), _condition(records)), notes=marked(records, "size", "norms"))


def _key_sizes(records: Sequence[Record]) -> list[int]:
    return sorted({record.config["d_k"] for record in records})


def _bulk(records: Sequence[Record]) -> Finding:
    """The closed form against differentiation; and whether its three others ever lie far outside the bulk."""
    exact: dict[int, bool] = {}
    texts, at_times, everywhere = [], True, True
    for d_k in _key_sizes(records):
        results = [record.result for record in where(records, d_k=d_k)]
        apart = max(result["apart"] for result in results)
        pairs = {result["multiplicity"] for result in results}
        outside = sum(max(map(abs, result["outliers"])) > OUTSIDE * result["bulk"] for result in results)
        exact[d_k] = apart < EXACT and pairs == {d_k - 1}
        at_times = at_times and outside > 0
        all_out = sum(min(map(abs, result["outliers"])) > result["bulk"] for result in results)
        everywhere = everywhere and all_out == len(results)
        told = " or ".join(map(str, sorted(pairs)))
        texts.append(
            f"d_K = {d_k}: {told} pairs, {apart:.0e} apart, outside in {outside / len(results):.0%}, all three in "
            f"{all_out / len(results):.0%}"
        )
    same = (
        {"the pairs": True} if all(exact.values()) else {f"d_K = {d}: the pairs": holds for d, holds in exact.items()}
    )
    return judged_parts(
        "scalar-bulk",
        "Pairs ±μ of the closed form, its largest distance from the eigenvalues of the differentiated loss in units of "
        f"the largest (the same if below {EXACT:g}), how often the largest of the three others is outside, more than "
        f"{OUTSIDE:g} times the bulk (it has to be at times), and how often all three are larger than the bulk, as "
        f"outliers would be: {'; '.join(texts)}.",
        same
        | {
            "a largest eigenvalue outside the bulk at times": all(exact.values()) and at_times,
            "three outliers": all(exact.values()) and everywhere,
        },
    )


def _condition(records: Sequence[Record]) -> Finding:
    """Between the smallest and the largest norm, in pairs of one seed."""
    parts, texts = {}, []
    for d_k in _key_sizes(records):
        line = sweep(where(records, d_k=d_k), "size", "condition")
        found = ratio(line.values[:, -1], line.values[:, 0])
        parts[f"d_K = {d_k}"] = changes(found, CONDITION)
        texts.append(f"d_K = {d_k}: {found}")
    sizes = sorted({record.config["size"] for record in records})
    return judged_parts(
        "scalar-condition",
        f"Condition number at norms of {sizes[-1]:g} over that at {sizes[0]:g}, geometric mean over the seeds with its "
        f"95 % interval: {'; '.join(texts)}. Sensitive means a change of more than {CONDITION:g} times.",
        parts,
    )


SCALAR = Experiment("scalar", "The spectrum of scalar attention", SLIDES, points, measure, report)
