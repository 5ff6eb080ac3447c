"""Theorem 3.2's zero: the functional part of the value block, by automatic differentiation, and what lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlens.data import Addition
from curvlens.papers.comparisons import ROUNDING, ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.first_paper.differentiated import flat_hessian
from curvlens.papers.first_paper.growth import SMALL, WHOLE
from curvlens.papers.first_paper.growth import WIDTH as WIDE
from curvlens.papers.setting import EPS, SEQUENCES, Weights, weights
from curvlens.papers.sizes import sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

BEHIND = {
    "unembedding": "the unembedding alone",
    "relu": "a ReLU MLP, as in Figure 3a",
    "gelu": "a GELU MLP",
    "pre relu": "a ReLU MLP with Pre-LN, as in Figure 3b",
}
WIDTH = 16
"""Of the networks whose blocks are dense."""
PROBES = 4
"""Random directions at the width of Figure 3a: a matrix that maps them to zero is zero."""


def points(effort: Effort) -> list[Config]:
    """Networks that differ in what lies behind attention; and those of Figure 3a, by products."""
    sigmas = grid(*WHOLE, 4 if effort.quick else 7)
    dense = [
        {"width": WIDTH, "behind": behind, "sigma": sigma, "seed": seed}
        for behind in BEHIND
        for seed in effort.repeats(3, 8)
        for sigma in sigmas
    ]
    wide = [
        {"width": 32 if effort.quick else WIDE, "behind": "relu", "sigma": sigma, "seed": seed}
        for seed in effort.repeats(3, 20)
        for sigma in sigmas
    ]
    return [*dense, *wide]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_f(V)‖ and ‖H(V)‖ of Figure 3a's network and its kin, dense; of wide ones ‖H_f(V) u‖/‖u‖, the largest."""
    task = Addition()
    w = weights(config["width"], sigma=config["sigma"], seed=config["seed"], task=task)
    logits, labels = network(w, *task.batch(SEQUENCES, seed=config["seed"]), config["behind"])

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, labels)

    out = logits(w.layer.v).detach().requires_grad_()
    (held,) = torch.autograd.grad(loss(out), out)

    def contracted(v: Tensor) -> Tensor:
        """⟨g, F⟩ with g = ∂ℓ/∂F held: its second derivative is the functional part."""
        return (held * logits(v)).sum()

    if config["width"] == WIDTH:
        functional, total = (flat_hessian(each, [w.layer.v]) for each in (contracted, lambda v: loss(logits(v))))
        return {"functional": float(functional.norm()), "total": sized(float(total.norm()))}
    draw, sizes = Draws(config["seed"], "probes"), []
    for _ in range(PROBES):
        probe = draw(config["width"], config["width"])
        v = w.layer.v.clone().requires_grad_()
        (by_v,) = torch.autograd.grad(contracted(v), v, create_graph=True)
        product = torch.autograd.grad(by_v, v, probe, allow_unused=True)[0] if by_v.requires_grad else None
        sizes.append(0.0 if product is None else float(product.norm() / probe.norm()))
    return {"functional": max(sizes)}


def network(w: Weights, ids: Tensor, labels: Tensor, behind: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The logits (N, vocabulary) of the digits that count as a function of W_V, and their labels (N)."""
    first = int((labels[0] >= 0).nonzero()[0])
    normed = behind.startswith("pre")

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=EPS) if normed else x

    x = w.embed[ids] + w.pos
    tokens = norm(x)
    scores = tokens[:, first:] @ w.layer.q @ w.layer.k.mT @ tokens.mT / w.layer.q.shape[1] ** 0.5
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[first:]
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ tokens

    def logits(v: Tensor) -> Tensor:
        state = x[:, first:] + mixed @ v @ w.layer.o
        if behind != "unembedding":
            act = F.gelu if behind.endswith("gelu") else F.relu
            state = state + act(norm(state) @ w.layer.up) @ w.layer.down
        return (norm(state) @ w.unembed).flatten(0, 1)

    return logits, labels[:, first:].flatten()


def report(records: Sequence[Record]) -> Report:
    """Where it is zero, and how large it is where it is not."""
    dense = [record for record in records if record.config["width"] == WIDTH]
    wide = [record for record in records if record.config["width"] != WIDTH]
    shares = {behind: _share(where(dense, behind=behind)) for behind in BEHIND}
    curved = {behind: share for behind, share in shares.items() if bool((share.values > 0).any())}
    chart = Chart(
        "value-functional",
        "The functional part of the value block, by what follows attention",
        f"‖H_f(V)‖/‖H(V)‖ by automatic differentiation, d = {WIDTH}, cross-entropy of 5-digit addition over "
        f"{SEQUENCES} sequences: mean over the seeds with its 95 % interval. Not drawn, since it is zero: "
        + (", ".join(name for behind, name in BEHIND.items() if behind not in curved) or "none")
        + ".",
        [
            Panel(
                [
                    share.curve(BEHIND[behind], shares=True, colour=i)
                    for i, (behind, share) in enumerate(curved.items())
                ],
                (),
                "",
                r"standard deviation $\sigma$ of the embeddings",
                r"$\|H_f(W_V)\| / \|H(W_V)\|$",
                "log",
            )
        ],
        columns=1,
    )
    largest = max(record.result["functional"] for record in wide)
    return Report((chart,), (_zero(dense, shares, largest),), (Number("fig3a V functional", largest, 0.0),))


def _share(records: Sequence[Record]) -> Sweep:
    functional, total = (sweep(records, "sigma", part) for part in ("functional", "total"))
    return Sweep(functional.x, functional.values / total.values)


def _zero(records: Sequence[Record], shares: Mapping[str, Sweep], largest: float) -> Finding:
    texts, parts = [], {}
    for behind, share in shares.items():
        most = float(share.values.max())
        parts[f"after attention {BEHIND[behind]}"] = most <= ROUNDING
        if most <= ROUNDING:
            texts.append(f"{BEHIND[behind]}: at most {most:.1g}")
            continue
        small = share.within(*SMALL)
        grown = sweep(where(records, behind=behind), "sigma", "functional").law(SMALL)
        ends = [ratio(each, torch.ones_like(each)) for each in (small.values[:, 0], share.values[:, -1])]
        at = ", ".join(
            f"{end.value:.2g} ({end.low:.2g} to {end.high:.2g}) at σ = {x:g}"
            for end, x in zip(ends, (small.x[0], share.x[-1]), strict=True)
        )
        texts.append(f"{BEHIND[behind]}: {at}, with ‖H_f(V)‖ of σ^{grown.slope:.2f} for σ ≤ {SMALL[1]:g}")
    return judged_parts(
        "value-functional",
        f"‖H_f(V)‖/‖H(V)‖ by automatic differentiation, by what follows attention: {'; '.join(texts)}. At most "
        f"{ROUNDING:.0e} counts as zero. At the width of Figure 3a {PROBES} random directions of each of its "
        f"networks are mapped to {largest:.1g}. The theorem is for one layer followed directly by the loss.",
        parts,
    )


VALUE_FUNCTIONAL = Experiment(
    "value-functional",
    "The functional part of the value block",
    f"{PAPER}, Theorem 3.2",
    points,
    measure,
    report,
)
