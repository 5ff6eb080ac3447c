"""A bound for one head of attention with the square loss, from norms alone or from its moments."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.inputs import attention_inputs
from curvlens.calculus.bounds.bound import Bound, in_range
from curvlens.calculus.moments import contracted
from curvlens.calculus.tensor_checks import alike

SOFTMAX = 0.5
"""sup ‖D softmax‖₂."""
SOFTMAX_SECOND = 6**0.5 / 9
"""sup ‖D² softmax‖, as a bilinear map."""


def _norm(matrix: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(matrix, 2)
    return size


@in_range
def attention(
    X: Float[Tensor, "l d"],
    WQ: Float[Tensor, "d k"],
    WK: Float[Tensor, "d k"],
    WV: Float[Tensor, "d v"],
    target: Float[Tensor, "l v"],
    *,
    data: bool = False,
) -> Bound:
    """A bound for one head and one sample, square loss ‖F − Y‖²/(L d_V).

    By default from the spectral norms of tokens and weights and from the residual alone; with ``data`` also from the
    attention moments, and then typically within a factor of five of the truth.

    >>> X, W = torch.eye(3, 2).double(), torch.eye(2).double()
    >>> bound = attention(X, W, W, W, torch.zeros(3, 2).double())
    >>> bound.total > bound.block("V", "V") > 0
    True
    """
    alike({"X": X, "WQ": WQ, "WK": WK, "WV": WV, "target": target})
    of = attention_inputs(X, WQ, WK, WV, mask=None, temperature=1.0, kind="softmax", context=None)
    a, residual = of.attention[0, 0], of.output[0] - target
    c, root = 2 / target.numel(), WQ.shape[1] ** 0.5
    x, q, k, v = (_norm(t) for t in (X, WQ, WK, WV))
    if data:
        g = c * residual
        found = contracted(a, X, g @ WV.mT)
        covariance = torch.linalg.matrix_norm(found.second, 2).max()  # instead of x²/2
        mean = _norm(a @ X)  # instead of √L x
        third = torch.linalg.matrix_norm(found.third, 2).max() / c  # instead of κ₃ r x³ v
        pulled = _norm(X.mT @ found.first_order) / c  # instead of ‖R‖ x³ v/2
    else:
        covariance, mean = x.square() * SOFTMAX, X.shape[0] ** 0.5 * x
        third = SOFTMAX_SECOND * residual.norm(dim=1).max() * x**3 * v
        pulled = residual.norm() * x**3 * v * SOFTMAX
    jacobian = torch.stack([x * covariance * k * v / root, x * covariance * q * v / root, mean])
    size = _norm(residual)
    qq, kk = third * (x * k) ** 2 / root**2, third * (x * q) ** 2 / root**2
    qk = third * x**2 * q * k / root**2 + pulled / root
    vq, vk = covariance * x * k * size / root, covariance * x * q * size / root
    zero = torch.zeros_like(qq)
    functional = torch.stack([torch.stack(row) for row in ((qq, qk, vq), (qk, kk, vk), (vq, vk, zero))])
    return Bound(("Q", "K", "V"), c * jacobian[:, None] * jacobian, c * functional)
