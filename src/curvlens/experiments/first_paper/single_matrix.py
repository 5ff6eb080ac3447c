"""Section 4.2 and Appendix D: one matrix W_QK or two, W_Q W_Kᵀ, in the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.calculus import attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.sizes import negative_share
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import mean, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel


def points(effort: Effort) -> list[Config]:
    """Key sizes below, at and above the width."""
    return [
        {"width": width, "d_k": d_k, "seed": seed}
        for width in ((4, 6) if effort.quick else (4, 6, 8))
        for d_k in range(1, width + 2)
        for seed in effort.repeats(3, 10)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Ranks, pairs of eigenvalues, and how the Hessian of W_QK = W_Q W_Kᵀ/√d_K enters that of two matrices."""
    draw = Draws(config["seed"])
    width, d_k = config["width"], config["d_k"]
    x, y = draw(2 * width, width), draw(2 * width, width)
    wq, wk = draw(width, d_k), draw(width, d_k)
    wv = draw(width, width, scale=1 / math.sqrt(width))
    two = attention.hessian(x, wq, wk, wv, target=y)
    one = attention.hessian_single(x, wq @ wk.mT / math.sqrt(d_k), wv, y)
    outer, functional = two.t_outer().dense(), two.t_functional().dense()
    # ∂ vec(W_Q W_Kᵀ)/∂(W_Q, W_K), row-vec
    eye = torch.eye(width, dtype=x.dtype)
    by_q = torch.einsum("ac,bk->abck", eye, wk).reshape(width * width, -1)
    by_k = torch.einsum("ak,bc->abck", wq, eye).reshape(width * width, -1)
    through = torch.cat([by_q, by_k], 1) / math.sqrt(d_k)
    expected = through.mT @ one.total["QK"] @ through
    values = torch.linalg.eigvalsh(functional)
    return {
        "rank": int(torch.linalg.matrix_rank(outer, hermitian=True, rtol=1e-11)),
        "bound": 2 * width * d_k - d_k**2 if d_k < width else width**2,
        "pairs": float((values + values.flip(0)).abs().max() / values.abs().max()),
        "multiple": float(
            (values.view(-1, d_k).max(1).values - values.view(-1, d_k).min(1).values).max() / values.abs().max()
        ),
        "apart": float((outer - expected).norm() / outer.norm()),
        "share": float(functional.norm() / (outer + functional).norm()),
        "negative": {"one": negative_share(one.total["QK"]), "two": negative_share(outer + functional)},
    }


def report(records: Sequence[Record]) -> Report:
    """Remark D.1, Lemma D.2 and Lemma 4.1."""
    pairs = max(record.result["pairs"] for record in records)
    multiple = max(record.result["multiple"] for record in records)
    apart = max(record.result["apart"] for record in records)
    over = [record for record in records if record.result["rank"] > record.result["bound"]]
    reached = sum(record.result["rank"] == record.result["bound"] for record in records) / len(records)
    share = mean("", [record.result["share"] for record in records])
    negative = {name: mean("", [record.result["negative"][name] for record in records]) for name in ("one", "two")}
    width = max(record.config["width"] for record in records)
    of = where(records, width=width)
    ranks = sweep(of, "d_k", "rank")
    bounds = sweep(of, "d_k", "bound")
    shares = sweep(of, "d_k", "share")
    both = [sweep(of, "d_k", "negative", name) for name in ("one", "two")]
    chart = Chart(
        "single-matrix",
        f"One matrix or two in the scores, d = {width}",
        "Left: the rank of the T-outer part and its bound. Middle: the share that the T-functional part has in the "
        "norm of the query-key Hessian. Right: the share of negative eigenvalues in the squared norm, with one "
        "matrix W_QK and with two.",
        [
            Panel(
                [
                    ranks.curve("rank of the T-outer part", shares=True),
                    bounds.curve("bound", shares=True, colour=1, style="dashed"),
                ],
                (),
                "rank",
                "$d_K$",
                "rank",
            ),
            Panel([shares.curve("", shares=True)], (), "T-functional part", "$d_K$", r"$\|H_f^T\| / \|H\|$"),
            Panel(
                [both[0].curve("one matrix", shares=True), both[1].curve("two matrices", shares=True, colour=1)],
                (),
                "negative eigenvalues",
                "$d_K$",
                r"share of $\|H\|^2$",
            ),
        ],
        columns=3,
    )
    findings = (
        Finding(
            "t-pairs",
            "holds" if max(pairs, multiple) < 1e-10 else "does not hold",
            f"Over {len(records)} layers the eigenvalues sum up in pairs to {pairs:.0e} of the largest, and groups "
            f"of d_K are equal to {multiple:.0e}.",
        ),
        Finding(
            "t-rank",
            "holds" if not over else "does not hold",
            f"Never exceeded in {len(records)} layers; reached in {reached:.0%} of them.",
        ),
        Finding(
            "single-matrix",
            "holds" if apart < 1e-10 else "does not hold",
            f"The T-outer part is the Hessian of W_QK pulled back through W_Q W_Kᵀ/√d_K to {apart:.0e}. What is gone "
            f"with one matrix is {share.value:.0%} of the norm of the query-key Hessian; negative eigenvalues hold "
            f"{negative['one'].value:.0%} of ‖H‖² with one matrix, {negative['two'].value:.0%} with two.",
        ),
    )
    return Report((chart,), findings)


SINGLE_MATRIX = Experiment(
    "single-matrix",
    "One matrix or two in the scores",
    f"{PAPER}, Section 4.2 and Appendix D",
    points,
    measure,
    report,
)
