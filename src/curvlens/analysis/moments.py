"""The moments M1, M2, M3 of a layer's input tokens under its attention weights, as sizes by head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

ENTRIES, CHUNK = 1 << 24, 1 << 22
"""Numbers of the matrices of one head, and of those held at a time."""


def sizes(A: Float[Tensor, "b h q k"], X: Float[Tensor, "b k d"]) -> dict[str, list[float] | int]:
    """Root mean squares of ‖M1‖, ‖M2‖_F and ‖M3‖_F over samples and query tokens, for each head.

    For one query token with weights a, M1 = Σ_j a_j x_j, and M2, M3 are the second and third central moment, a matrix
    and a tensor of the input's width. With c_j = x_j − M1 their norms follow from inner products alone:
    ‖M2‖²_F = Σ_jk a_j a_k (c_j·c_k)², ‖M3‖²_F = Σ_jk a_j a_k (c_j·c_k)³. Of many tokens, ``rows`` evenly spaced ones
    are taken.
    """
    samples, heads, n_queries, n_keys = A.shape
    count = min(samples * n_queries, max(ENTRIES // n_keys**2, 8))
    places = torch.linspace(0, samples * n_queries - 1, count, dtype=torch.float64).round().long()
    squares = torch.zeros(3, heads, dtype=torch.float64)
    for b in range(samples):
        rows = places[places // n_queries == b] % n_queries
        x = X[b].double()
        centre = x.mean(0)
        y = x - centre  # central moments do not change, and lose fewer digits
        gram = y @ y.T
        for part in torch.split(rows, max(CHUNK // n_keys**2, 1)):
            for h in range(heads):
                a = A[b, h, part.to(A.device)].double()
                squares[:, h] += torch.stack(_squares(a, y, gram, centre)).cpu()
    m1, m2, m3 = (squares.clamp(min=0) / count).sqrt().tolist()
    return {"m1": m1, "m2": m2, "m3": m3, "rows": count}


def _squares(
    a: Float[Tensor, "r k"], y: Float[Tensor, "k d"], gram: Float[Tensor, "k k"], centre: Float[Tensor, " d"]
) -> tuple[Tensor, Tensor, Tensor]:
    """‖M1‖², ‖M2‖²_F, ‖M3‖²_F, summed over rows of attention weights."""
    m = a @ y
    along = m @ y.T
    inner = gram - along[:, :, None] - along[:, None, :] + m.square().sum(-1)[:, None, None]  # c_j·c_k
    second, third = (torch.einsum("rj,rjk,rk->", a, inner**power, a) for power in (2, 3))
    mean = m + a.sum(-1, keepdim=True) * centre
    return mean.square().sum(), second, third
