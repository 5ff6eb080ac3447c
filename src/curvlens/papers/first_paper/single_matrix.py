"""Section 4.2 and Appendix D: one matrix W_QK or two, W_Q W_Kᵀ, in the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.comparisons import ROUNDING
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.differentiated import apart, flat_hessian
from curvlens.papers.sizes import negative_share
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import mean, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record


def points(effort: Effort) -> list[Config]:
    """Key sizes below, at and above the width."""
    return [
        {"width": width, "d_k": d_k, "seed": seed}
        for width in ((4, 6) if effort.quick else (4, 6, 8))
        for d_k in range(1, width + 2)
        for seed in effort.repeats(3, 10)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Ranks, pairs of eigenvalues, and how the Hessian of W_QK = W_Q W_Kᵀ/√d_K enters that of two matrices.

    The T-functional part, whose pairs are built into its closed form, is differentiated automatically.
    """
    draw = Draws(config["seed"])
    width, d_k = config["width"], config["d_k"]
    x, y = draw(2 * width, width), draw(2 * width, width)
    wq, wk = draw(width, d_k), draw(width, d_k)
    wv = draw(width, width, scale=1 / math.sqrt(width))
    single = wq @ wk.mT / math.sqrt(d_k)
    two = attention.hessian(x, wq, wk, wv, target=y)
    one = attention.hessian_single(x, single, wv, y)
    outer, closed = two.t_outer().dense(), two.t_functional().dense()

    def loss(matrix: Tensor) -> Tensor:
        return ((x @ matrix @ x.mT).softmax(-1) @ x @ wv - y).square().mean()

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return x @ q @ k.mT @ x.mT / math.sqrt(d_k)

    at = scores(wq, wk).requires_grad_()
    (by_scores,) = torch.autograd.grad((at.softmax(-1) @ x @ wv - y).square().mean(), at)
    functional = flat_hessian(lambda q, k: (by_scores * scores(q, k)).sum(), [wq, wk])  # ∂ℓ/∂T held
    whole = flat_hessian(lambda q, k: loss(q @ k.mT / math.sqrt(d_k)), [wq, wk])
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
        "pulled": apart(expected, whole - functional),
        "apart": max(
            apart(closed, functional),
            apart(outer, whole - functional),
            apart(one.total["QK"], flat_hessian(loss, [single])),
        ),
        "share": float(functional.norm() / (outer + functional).norm()),
        "negative": {"one": negative_share(one.total["QK"]), "two": negative_share(outer + functional)},
    }


def report(records: Sequence[Record]) -> Report:
    """Remark D.1, Lemma D.2 and Lemma 4.1."""
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
    text = (
        f"What is gone with one matrix is {share.value:.0%} of the norm of the query-key Hessian; negative eigenvalues "
        f"hold {negative['one'].value:.0%} of ‖H‖² with one matrix, {negative['two'].value:.0%} with two (means over "
        f"d = {', '.join(map(str, sorted({record.config['width'] for record in records})))} and all d_K; the figure "
        f"has d = {width})"
    )
    return Report((chart,), (_pairs(records), _rank(records), _single(records, text)))


def _sizes(records: Sequence[Record], test: Callable[[Record], bool]) -> dict[str, bool | None]:
    """Whether something is true of all layers with keys narrower than the tokens, and of those with wider ones."""
    groups = {
        "d_K < d": [record for record in records if record.config["d_k"] < record.config["width"]],
        "d_K ≥ d": [record for record in records if record.config["d_k"] >= record.config["width"]],
    }
    return {name: all(test(record) for record in of) for name, of in groups.items() if of}


def _pairs(records: Sequence[Record]) -> Finding:
    pairs, multiple = (max(record.result[name] for record in records) for name in ("pairs", "multiple"))
    return judged_parts(
        "t-pairs",
        f"Over {len(records)} layers, by automatic differentiation: the eigenvalues sum up in pairs to {pairs:.0e} of "
        f"the largest, and groups of d_K are equal to {multiple:.0e}; equal means to {ROUNDING:.0e}. "
        f"{_closed_forms(records)}",
        _sizes(records, lambda record: max(record.result["pairs"], record.result["multiple"]) <= ROUNDING),
    )


def _closed_forms(records: Sequence[Record]) -> str:
    return f"The closed forms agree with it to {max(record.result['apart'] for record in records):.0e}."


def _rank(records: Sequence[Record]) -> Finding:
    over = sum(record.result["rank"] > record.result["bound"] for record in records)
    reached = sum(record.result["rank"] == record.result["bound"] for record in records)
    return judged_parts(
        "t-rank",
        f"Exceeded in {over} of {len(records)} layers, reached in {reached}.",
        _sizes(records, lambda record: record.result["rank"] <= record.result["bound"]),
    )


def _single(records: Sequence[Record], text: str) -> Finding:
    pulled = max(record.result["pulled"] for record in records)
    return judged_parts(
        "single-matrix",
        "The Hessian of W_QK, pulled back through W_Q W_Kᵀ/√d_K, is that of W_Q and W_K without its T-functional part, "
        f"by automatic differentiation, to {pulled:.0e}; equal means to {ROUNDING:.0e}. {text}. "
        f"{_closed_forms(records)}",
        _sizes(records, lambda record: record.result["pulled"] <= ROUNDING),
    )


SINGLE_MATRIX = Experiment(
    "single-matrix",
    "One matrix or two in the scores",
    f"{PAPER}, Section 4.2 and Appendix D",
    points,
    measure,
    report,
    revision=2,
)
