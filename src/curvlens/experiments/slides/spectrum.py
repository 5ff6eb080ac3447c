"""The whole spectrum of scalar attention in closed form: a bulk of pairs and three outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import scalar_attention
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.slides.scalar_layer import scalar_layer
from curvlens.experiments.sources import SLIDES
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, grid, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel


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
    apart = max(record.result["apart"] for record in records)
    panels, texts = [], []
    conditions, ratios = [], []
    for colour, d_k in enumerate((2, 8, 32)):
        of = where(records, d_k=d_k)
        condition = sweep(of, "size", "condition")
        conditions.append(condition.curve(f"$d_K = {d_k}$", colour=colour))
        bulk, top = sweep(of, "size", "bulk"), sweep(of, "size", "outliers", 2)
        ratios.append(Sweep(bulk.x, top.values / bulk.values).curve(f"$d_K = {d_k}$", colour=colour))
        ends = condition.middle()
        texts.append(f"d_K = {d_k}: from {float(ends.min()):.2g} to {float(ends.max()):.2g}")
    label = r"norm of $w_Q$ and of $w_K$"
    panels = [
        Panel(conditions, (), "condition number", label, r"$\max|\lambda| / \min|\lambda|$", "log", "log"),
        Panel(ratios, (), "largest outlier over the bulk", label, r"$\lambda_{\max} / |\mu|$", "log", "log"),
    ]
    chart = Chart(
        "scalar",
        "Scalar attention: the spectrum in closed form",
        "Attention with scalar tokens and values and query and key weights in d_K dimensions. Left: the condition "
        "number of the Hessian. Right: the largest eigenvalue over the size of the bulk.",
        panels,
    )
    larger = [record.result["outliers"][2] / record.result["bulk"] for record in records]
    inside = sum(max(map(abs, record.result["outliers"])) > 3 * record.result["bulk"] for record in records)
    spread = [max(curve.y) / min(curve.y) for curve in conditions]
    findings = (
        Finding(
            "scalar-bulk",
            "holds" if apart < 1e-10 else "does not hold",
            f"The closed form is the spectrum of the differentiated loss to {apart:.0e} of its largest eigenvalue, "
            "for d_K = 2, 8 and 32: d_K − 1 pairs ±μ and three others. The largest of those is 3 times the bulk or "
            f"more in {inside / len(records):.0%} of the cases; λ_max/|μ| goes from {min(larger):.2g} to "
            f"{max(larger):.2g}.",
        ),
        Finding(
            "scalar-condition",
            "holds" if min(spread) > 10 else "does not hold",
            "Condition number over norms from 0.1 to 10, mean over the seeds: " + "; ".join(texts) + ".",
        ),
    )
    return Report((chart,), findings)


SCALAR = Experiment("scalar", "The spectrum of scalar attention", SLIDES, points, measure, report)
