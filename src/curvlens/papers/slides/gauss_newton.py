"""How well the Gauss–Newton matrix has the largest eigenvalue, for attention and for MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention, feedforward, linear_mlp, scalar_attention
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.signs import LEVEL, larger
from curvlens.papers.slides.scalar_layer import scalar_layer
from curvlens.papers.sources import SLIDES
from curvlens.papers.sweeps import where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

RESIDUALS = (0.1, 1.0, 10.0)
"""Of the targets from the outputs, in units of the outputs' standard deviation."""
NETWORKS = {
    "scalar": "scalar attention",
    "attention": "attention",
    "linear attention": "linear attention",
    "mlp": "linear MLP, 2 layers",
    "deep mlp": "linear MLP, 4 layers",
    "relu mlp": "ReLU MLP",
    "gelu mlp": "GELU MLP",
}
ATTENTION, MLPS = ("scalar", "attention"), ("mlp", "deep mlp", "relu mlp", "gelu mlp")
"""What the claim compares: attention with softmax, as in the slides, and MLPs."""
BENT = {"relu mlp": "relu", "gelu mlp": "gelu"}
"""MLPs of two layers with an activation between, as wide as the linear ones."""


def points(effort: Effort) -> list[Config]:
    """Networks at random weights on the same tokens, with targets at a given distance from the outputs."""
    return [
        {"network": network, "residual": residual, "seed": seed}
        for network in NETWORKS
        for residual in RESIDUALS
        for seed in effort.repeats(20, 100)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """λ_max of the Hessian and of the Gauss–Newton matrix.

    The residual is noise of its own stream, independent of tokens and weights in every network.
    """
    network, noise, width = config["network"], Draws(config["seed"], "noise"), 6

    def target(out: Tensor) -> Tensor:
        return out + float(config["residual"]) * out.std() * noise(*out.shape)

    if network == "scalar":
        x, q, k, v, _ = scalar_layer(config["seed"], width, 1.0)
        out = attention.forward(x[..., None], q[None], k[None], torch.tensor([[v]], dtype=x.dtype)).squeeze(-1)
        found = scalar_attention.spectrum(x, q, k, v, target(out))
        return {"hessian": float(found.eigenvalues[-1]), "ggn": float(found.ggn_eigenvalues[-1])}
    draw, scale = Draws(config["seed"]), 1 / math.sqrt(width)
    x = draw(16, 10, width)
    if network in BENT:
        up, down = (draw(width, width, scale=scale) for _ in range(2))
        out = feedforward.forward(x, up, down, activation=BENT[network])
        H: Any = feedforward.hessian(x, up, down, target(out), activation=BENT[network])
    elif "mlp" in network:
        weights = [draw(width, width, scale=scale) for _ in range(4 if network.startswith("deep") else 2)]
        out = x
        for weight in weights:
            out = out @ weight.mT
        H = linear_mlp.hessian(x, weights, target(out))
    else:
        kind: Any = "linear" if network.startswith("linear") else "softmax"
        wq, wk, wv = (draw(width, width, scale=scale) for _ in range(3))
        out = attention.forward(x, wq, wk, wv, kind=kind)
        H = attention.hessian(x, wq, wk, wv, target=target(out), kind=kind)
    top = [float(torch.linalg.eigvalsh(part.dense())[-1]) for part in (H.total, H.outer)]
    return {"hessian": top[0], "ggn": top[1]}


def _off(records: Sequence[Record], network: str, residual: float) -> list[float]:
    """Relative differences of the largest eigenvalues, in the order of the seeds."""
    of = sorted(where(records, network=network, residual=residual), key=lambda record: record.config["seed"])
    return [abs(r.result["ggn"] - r.result["hessian"]) / abs(r.result["hessian"]) for r in of]


def report(records: Sequence[Record]) -> Report:
    """How far apart they are, at every distance of the targets."""
    curves = []
    for colour, (network, name) in enumerate(NETWORKS.items()):
        off = torch.tensor([_off(records, network, residual) for residual in RESIDUALS], dtype=torch.float64)
        low, middle, high = (off.quantile(share, dim=1).tolist() for share in (0.25, 0.5, 0.75))
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
    texts = [f"{curve.label}: " + ", ".join(f"{middle:.2g}" for middle in curve.y) for curve in curves]
    return Report((chart,), (_worse(records, "; ".join(texts)),))


def _worse(records: Sequence[Record], medians: str) -> Finding:
    """Attention against every MLP at the same residual, in pairs of one seed."""
    parts, counts = {}, []
    for network in ATTENTION:
        for residual in RESIDUALS:
            one = _off(records, network, residual)
            against = [larger(one, _off(records, mlp, residual)) for mlp in MLPS]
            parts[f"{NETWORKS[network]} against every MLP at a residual of {residual:g}"] = all_of(against)
        for mlp in MLPS:
            shares = []
            for residual in RESIDUALS:
                one, other = (_off(records, each, residual) for each in (network, mlp))
                shares.append(f"{sum(a > b for a, b in zip(one, other, strict=True))} of {len(one)}")
            counts.append(f"{NETWORKS[network]} against {NETWORKS[mlp]} {', '.join(shares)}")
    return judged_parts(
        "ggn-top",
        f"At residuals of {', '.join(f'{residual:g}' for residual in RESIDUALS)} times the outputs, median relative "
        f"difference of λ_max: {medians}. Seeds for which it is larger: {'; '.join(counts)}; sign test at {LEVEL:.0%}. "
        "Linear attention is shown beside them, and not judged.",
        parts,
    )


GGN_TOP = Experiment(
    "ggn-top", "The Gauss–Newton matrix at the top of the spectrum", SLIDES, points, measure, report, revision=2
)
