"""The kernel of the outer part: bounds on its rank, and directions that do not change the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.form import Form
from curvlens.calculus.room import require_room
from curvlens.errors import CurvlensError


class RankBound(NamedTuple):
    """Two upper bounds on the rank of the T-outer part."""

    lemma: int
    """Lemma D.2: 2 d d_K − d_K² for d_K < d, else d²."""
    sharper: int
    """Uses the ranks of the tokens and the supports of the rows; attained for generic weights."""


def rank_bound(of: AttentionInputs, head: int) -> RankBound:
    """Bounds on the rank of the T-outer part of one head."""
    d_q, d_k = of.WQ.shape[1:]
    d = of.keys.shape[-1]
    softmax = of.kind == "softmax"
    # a softmax sees κ through differences of tokens; linear attention sees it through W_V alone
    keys = of.keys - of.keys.mean(1, keepdim=True) if softmax else of.keys
    r, rho = (int(torch.linalg.matrix_rank(x.flatten(0, 1).double())) for x in (of.queries, keys))
    a, b = min(d_k, rho), min(d_k, r)
    if softmax:
        support = (of.attention[head] != 0).sum(-1) - 1
    else:  # Ξ sums over the keys that a query may see, without weights
        seen = of.keys.new_ones(1, dtype=torch.bool) if of.allowed is None else of.allowed
        support = seen.expand(*of.queries.shape[:2], of.keys.shape[1]).sum(-1)
    rows = int(support.clamp(min=0, max=d if softmax else min(d, of.d_out)).sum())
    lemma = d_k * d_q + d_k * d - d_k**2 if d_k < min(d, d_q) else d * d_q
    return RankBound(lemma, min(r * a + rho * b - a * b, rows))


def gauge(of: AttentionInputs, names: Mapping[tuple[str, int], str], form: Form) -> Float[Tensor, "n k"]:
    """(W_Q Ξ, −W_K Ξᵀ) and (W_V Ξ, −Ξ W_O) for all Ξ, as columns; ``names`` are blocks by letter and head."""
    pairs = (("Q", "K", of.WQ, of.WK), ("V", "O", of.down, of.up))
    found = [
        (one, form.slices[names[one, head]], form.slices[names[other, head]], first[head], second[head])
        for one, other, first, second in pairs
        for head in range(of.heads)
        if second is not None and (one, head) in names and (other, head) in names
    ]
    if not found:
        raise CurvlensError("No gauge directions: they need both Q and K, or a low-rank value, among the blocks.")
    count = sum(first.shape[1] ** 2 for *_, first, _ in found)
    require_room(
        2 * form.size * count,
        of.queries,
        "All gauge directions, with as much to work in,",
        "One is (W_Q Ξ, −W_K Ξᵀ), for a matrix Ξ (d_K, d_K) of your own.",
    )
    columns = torch.zeros(form.size, count, dtype=of.queries.dtype, device=of.queries.device)
    start = 0
    for one, above, below, first, second in found:
        n = first.shape[1]
        xi = torch.eye(n * n, dtype=first.dtype, device=first.device).view(n * n, n, n)
        own = slice(start, start + n * n)
        columns[above, own] = (first @ xi).flatten(1).T
        columns[below, own] = -(second @ xi.mT if one == "Q" else xi @ second).flatten(1).T
        start = own.stop
    return columns
