"""The slides: the whole spectrum of scalar attention, the Gauss–Newton matrix at the top, attention sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens.calculus import attention, linear_mlp, scalar_attention
from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.growth import grid
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, sweep
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel
from curvlens.losses import CrossEntropy
from curvlens.models import GPT, GPTConfig
from curvlens.operators import hessian
from curvlens.problem import Problem

SLIDES = "slides on What does it mean to be a Transformer?"


# The spectrum of scalar attention


def points_scalar(effort: Effort) -> list[Config]:
    """Norms of the query and key weights from 0.1 to 10."""
    return [
        {"d_k": d_k, "size": size, "seed": seed}
        for d_k in (2, 8, 32)
        for seed in effort.repeats(5, 20)
        for size in grid(0.1, 10, 7 if effort.quick else 13)
    ]


def _scalar(seed: int, d_k: int, size: float) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """Tokens, query and key weights of a given norm, the value weight and targets."""
    draw = Draws(seed)
    x, y = draw(16, 10), draw(16, 10)
    q, k = draw(d_k), draw(d_k)
    return x, size * q / q.norm(), size * k / k.norm(), float(draw(1)) + 1.0, y


def measure_scalar(config: Config) -> Mapping[str, Any]:
    """The closed form, and how far it is from the eigenvalues of a matrix of second derivatives."""
    x, q, k, v, y = _scalar(config["seed"], config["d_k"], config["size"])
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


def report_scalar(records: Sequence[Record]) -> Report:
    """Bulk, outliers and condition number over the norm of the weights."""
    apart = max(record.result["apart"] for record in records)
    panels, texts = [], []
    conditions, ratios = [], []
    for colour, d_k in enumerate((2, 8, 32)):
        of = [record for record in records if record.config["d_k"] == d_k]
        condition = sweep(of, "size", "condition")
        conditions.append(condition.curve(f"$d_K = {d_k}$", colour=colour))
        bulk, top = sweep(of, "size", "bulk"), sweep(of, "size", "outliers", 2)
        ratios.append(Sweep(bulk.x, top.values / bulk.values).curve(f"$d_K = {d_k}$", colour=colour))
        ends = condition.values.log().mean(0).exp()
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


# Gauss–Newton at the top


def points_ggn(effort: Effort) -> list[Config]:
    """Networks at random weights on the same tokens, with targets at a given distance from the outputs."""
    return [
        {"network": network, "residual": residual, "seed": seed}
        for network in NETWORKS
        for residual in RESIDUALS
        for seed in effort.repeats(20, 100)
    ]


RESIDUALS = (0.1, 1.0, 10.0)
"""Of the targets from the outputs, in units of the outputs' standard deviation."""
NETWORKS = {
    "scalar": "scalar attention",
    "attention": "attention",
    "linear attention": "linear attention",
    "mlp": "linear MLP, 2 layers",
    "deep mlp": "linear MLP, 4 layers",
}


def measure_ggn(config: Config) -> Mapping[str, Any]:
    """λ_max of the Hessian and of the Gauss–Newton matrix."""
    network, draw, width = config["network"], Draws(config["seed"]), 6

    def target(out: Tensor) -> Tensor:
        noise = draw(*out.shape)
        return out + float(config["residual"]) * out.std() * noise

    if network == "scalar":
        x, q, k, v, _ = _scalar(config["seed"], width, 1.0)
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


def report_ggn(records: Sequence[Record]) -> Report:
    """How far apart they are, at every distance of the targets."""
    curves, medians = [], {}
    for colour, (network, name) in enumerate(NETWORKS.items()):
        rows = []
        for residual in RESIDUALS:
            off = sorted(
                abs(record.result["ggn"] - record.result["hessian"]) / record.result["hessian"]
                for record in records
                if record.config["network"] == network and record.config["residual"] == residual
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


# Sinks


def points_sink(effort: Effort) -> list[Config]:
    """A bias towards the first token; the first token as the others, or an outlier."""
    return [
        {"sink": sink, "first": first, "seed": seed}
        for first in (1.0, 5.0)
        for seed in effort.repeats(20, 100)
        for sink in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0)
    ]


def measure_sink(config: Config) -> Mapping[str, Any]:
    """Bulk and outliers."""
    x, q, k, v, y = _scalar(config["seed"], 8, 1.0)
    x[:, 0] *= config["first"]
    found = scalar_attention.spectrum(x, q, k, v, y, sink=config["sink"])
    return {"bulk": found.bulk.value, "top": float(found.outliers.abs().max())}


def report_sink(records: Sequence[Record]) -> Report:
    """Whether the bulk shrinks and the outliers grow."""
    panels, texts, shrinks, grows = [], [], [], []
    for first, name in ((1.0, "first token as the others"), (5.0, "first token five times as large")):
        of = [record for record in records if record.config["first"] == first]
        bulk, top = sweep(of, "sink", "bulk"), sweep(of, "sink", "top")
        panels.append(
            Panel(
                [bulk.curve(r"bulk $|\mu|$"), top.curve("largest outlier", colour=1)],
                (),
                name,
                "bias towards the first token",
                r"$|\lambda|$",
                y_scale="log",
            )
        )
        ends = [[float(e) for e in line.values.log().mean(0).exp()[[0, -1]]] for line in (bulk, top)]
        shrinks.append(ends[0][1] < ends[0][0])
        grows.append(ends[1][1] > ends[1][0])
        texts.append(
            f"{name}: bulk {ends[0][0]:.2g} → {ends[0][1]:.2g}, largest outlier {ends[1][0]:.2g} → {ends[1][1]:.2g}"
        )
    chart = Chart(
        "sink-scalar",
        "Attention sinks in scalar attention",
        "A bias of the scores towards the first token: geometric mean over the seeds with its 95 % interval.",
        panels,
    )
    everywhere = all(shrinks) and all(grows)
    finding = Finding(
        "sink-scalar",
        "holds" if everywhere else "holds when" if all(shrinks) and any(grows) else "does not hold",
        "Sink from 0 to 8, geometric means: " + "; ".join(texts) + ".",
        ""
        if everywhere
        else "the bulk always; the outliers " + ("with an outlier at the sink" if grows[1] else "without one"),
    )
    return Report((chart,), (finding,))


class Sunk(nn.Module):
    """A layer's attention with a bias towards the first token."""

    def __init__(self, own: Any, sink: float) -> None:
        super().__init__()
        self.own, self.sink = own, sink

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own, with a sink."""
        own = self.own
        q, k, v = (f(x).unflatten(-1, (own.n_head, -1)).transpose(1, 2) for f in (own.q, own.k, own.v))
        bias = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        bias[:, 0] += self.sink
        mixed: Tensor = own.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return mixed


def points_sink_gpt(effort: Effort) -> list[Config]:
    """GPTs that were trained with a sink in every layer."""
    return [
        {"sink": sink, "steps": 100 if effort.quick else 400, "seed": seed}
        for seed in effort.repeats(2, 5)
        for sink in (0.0, 2.0, 4.0, 6.0)
    ]


def trained(task: Addition, *, seed: int, steps: int, sink: float = 0.0, **variant: Any) -> GPT:
    """A small GPT that learns to add, in float64, from a seed."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_mlp": 16} | variant
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, **settings)).double()
    if sink:
        for block in model.h:
            block.attn = Sunk(block.attn, sink)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = task.batch(64, seed=1_000_000 * (seed + 1) + step)
        adam.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return model.eval()


def measure_sink_gpt(config: Config) -> Mapping[str, Any]:
    """Eigenvalues of the whole Hessian, dense."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=config["steps"], sink=config["sink"])
    problem = Problem(model, [task.batch(16, seed=0)], CrossEntropy())
    values = torch.linalg.eigvalsh(hessian(problem).dense())
    return {
        "top": float(values[-1]),
        "bottom": float(-values[0]),
        "middle": float(values.abs().quantile(0.5)),
        "norm": float(values.norm()),
        "loss": float(problem.loss()),
    }


def report_sink_gpt(records: Sequence[Record]) -> Report:
    """Whether the spectrum is stretched."""
    names = {"top": r"$\lambda_{\max}$", "bottom": r"$-\lambda_{\min}$", "middle": r"median of $|\lambda|$"}
    lines = {name: sweep(records, "sink", name) for name in names}
    chart = Chart(
        "sink-gpt",
        "Attention sinks in a trained GPT",
        "GPTs of two layers that learnt to add with a bias towards the first token in every layer: geometric mean "
        "over the seeds with its 95 % interval.",
        [
            Panel(
                [line.curve(names[name], colour=i) for i, (name, line) in enumerate(lines.items())],
                (),
                "",
                "bias towards the first token",
                "eigenvalues of the Hessian",
                y_scale="log",
            )
        ],
        columns=1,
    )
    ratio = lines["top"].values / lines["middle"].values
    ends = ratio.log().mean(0).exp()
    tops = lines["top"].values.log().mean(0).exp()
    rises = [bool((row[-1] > row[0]).item()) for row in ratio]
    finding = Finding(
        "sink-gpt",
        "holds" if all(rises) else "holds when" if float(ends[-1]) > float(ends[0]) else "does not hold",
        f"λ_max goes from {float(tops[0]):.3g} without a sink to {float(tops[-1]):.3g} with a bias of "
        f"{lines['top'].x[-1]:g}, λ_max over the median of |λ| from {float(ends[0]):.2g} to {float(ends[-1]):.2g} "
        f"(geometric means over {len(ratio)} trained models; larger in {sum(rises)} of them).",
        "" if all(rises) else "on average, not in every model",
    )
    return Report((chart,), (finding,))


SCALAR = Experiment(
    "scalar", "The spectrum of scalar attention", f"{SLIDES}", points_scalar, measure_scalar, report_scalar
)
GGN_TOP = Experiment(
    "ggn-top", "The Gauss–Newton matrix at the top of the spectrum", f"{SLIDES}", points_ggn, measure_ggn, report_ggn
)
SINK = Experiment("sink-scalar", "Sinks in scalar attention", f"{SLIDES}", points_sink, measure_sink, report_sink)
SINK_GPT = Experiment(
    "sink-gpt", "Sinks in a trained GPT", f"{SLIDES}", points_sink_gpt, measure_sink_gpt, report_sink_gpt
)
