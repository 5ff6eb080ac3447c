"""How well the Gauss–Newton matrix has the largest eigenvalue, for attention and for MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention, linear_mlp, scalar_attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.slides.scalar_layer import scalar_layer
from curvlens.experiments.sources import SLIDES
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel

RESIDUALS = (0.1, 1.0, 10.0)
"""Of the targets from the outputs, in units of the outputs' standard deviation."""
NETWORKS = {
    "scalar": "scalar attention",
    "attention": "attention",
    "linear attention": "linear attention",
    "mlp": "linear MLP, 2 layers",
    "deep mlp": "linear MLP, 4 layers",
}


def points(effort: Effort) -> list[Config]:
    """Networks at random weights on the same tokens, with targets at a given distance from the outputs."""
    return [
        {"network": network, "residual": residual, "seed": seed}
        for network in NETWORKS
        for residual in RESIDUALS
        for seed in effort.repeats(20, 100)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """λ_max of the Hessian and of the Gauss–Newton matrix."""
    network, draw, width = config["network"], Draws(config["seed"]), 6

    def target(out: Tensor) -> Tensor:
        noise = draw(*out.shape)
        return out + float(config["residual"]) * out.std() * noise

    if network == "scalar":
        x, q, k, v, _ = scalar_layer(config["seed"], width, 1.0)
        out = attention.forward(x[..., None], q[None], k[None], torch.tensor([[v]], dtype=x.dtype)).squeeze(-1)
        found = scalar_attention.spectrum(x, q, k, v, target(out))
        return {"hessian": float(found.eigenvalues[-1]), "ggn": float(found.ggn_eigenvalues[-1])}
    x, scale = draw(16, 10, width), 1 / math.sqrt(width)
    if "mlp" in network:
        weights = [draw(width, width, scale=scale) for _ in range(4 if network.startswith("deep") else 2)]
        out = x
        for weight in weights:
            out = out @ weight.mT
        H: Any = linear_mlp.hessian(x, weights, target(out))
    else:
        kind: Any = "linear" if network.startswith("linear") else "softmax"
        wq, wk, wv = (draw(width, width, scale=scale) for _ in range(3))
        out = attention.forward(x, wq, wk, wv, kind=kind)
        H = attention.hessian(x, wq, wk, wv, target=target(out), kind=kind)
    top = [float(torch.linalg.eigvalsh(part.dense())[-1]) for part in (H.total, H.outer)]
    return {"hessian": top[0], "ggn": top[1]}


def report(records: Sequence[Record]) -> Report:
    """How far apart they are, at every distance of the targets."""
    curves, medians = [], {}
    for colour, (network, name) in enumerate(NETWORKS.items()):
        rows = []
        for residual in RESIDUALS:
            off = sorted(
                abs(record.result["ggn"] - record.result["hessian"]) / record.result["hessian"]
                for record in where(records, network=network, residual=residual)
            )
            rows.append((off[len(off) // 2], off[len(off) // 4], off[3 * len(off) // 4]))
            medians[network, residual] = rows[-1][0]
        middle, low, high = zip(*rows, strict=True)
        curves.append(Curve(name, RESIDUALS, middle, low, high, colour=colour))
    chart = Chart(
        "ggn-top",
        "How far the Gauss–Newton matrix is from the Hessian at the top",
        "Relative difference of the largest eigenvalues at random weights, square loss, over the distance of the "
        "targets from the outputs: median and quartiles over the seeds.",
        [
            Panel(
                curves,
                (),
                "",
                "residual over the spread of the outputs",
                r"$|\lambda_{\max}(GGN) - \lambda_{\max}(H)|\,/\,\lambda_{\max}(H)$",
                "log",
                "log",
            )
        ],
        columns=1,
    )
    worse = [
        medians[one, residual] > medians["mlp", residual] for one in ("scalar", "attention") for residual in RESIDUALS
    ]
    texts = [
        f"{name}: " + ", ".join(f"{medians[network, residual]:.1%}" for residual in RESIDUALS)
        for network, name in NETWORKS.items()
    ]
    finding = Finding(
        "ggn-top",
        "holds" if all(worse) else "holds when" if any(worse) else "does not hold",
        "Median relative difference of λ_max at residuals of 0.1, 1 and 10 times the outputs: "
        + "; ".join(texts)
        + ".",
        "" if all(worse) or not any(worse) else "some residuals and models, not as a rule",
    )
    return Report((chart,), (finding,))


GGN_TOP = Experiment("ggn-top", "The Gauss–Newton matrix at the top of the spectrum", SLIDES, points, measure, report)
