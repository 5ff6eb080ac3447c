"""What every block of the Hessian is made of, one row a query token: moments, and their products with the weights.

Token i sees the layer as f_i = W_Vᵀ ∇Φ_i(κ_i), κ_i = τ W_K W_Qᵀ x_i. For softmax attention Φ_i is a log-sum-exp, whose
derivatives are the attention moments; for linear attention Φ_i(κ) = ½ κᵀ Ξ_i κ with Ξ_i = Σ_j x_j x_jᵀ over the keys
it may see. Only m = ∇Φ, M2 = ∇²Φ and, contracted with u = W_V g, p = M2 u and G = ∇³Φ[u] enter: so both kinds are one
formula.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from curvlens.calculus.attention.layer import Curvature, Layer, Loss
from curvlens.calculus.inputs import require_room
from curvlens.calculus.moments import contracted, uncentred


class ForProducts:
    """What a product with a vector needs, (H, N, ·) and (H, ·, ·); with one head, without the head axis."""

    def __init__(self, state: State) -> None:
        layer = state.layer
        heads = layer.heads

        def bare(tensor: Tensor) -> Tensor:  # products of matrices cost a third of products of batches of one
            return tensor[0] if heads == 1 else tensor

        self.x, self.g = bare(state.x.expand(heads, -1, -1)), bare(state.g.expand(heads, -1, -1))
        self.m, self.b = bare(state.m), bare(state.tau * state.B)
        self.wq, self.wv, self.down = bare(layer.WQ), bare(layer.WV), bare(layer.down)
        self.wk = None if layer.WK is None else bare(layer.WK)
        self.up = None if layer.up is None else bare(layer.up)
        self.x_t, self.m_t, self.b_t, self.wv_t = self.x.mT, self.m.mT, self.b.mT, self.wv.mT
        self.wk_t = self.wv_t if self.wk is None else self.wk.mT
        self.second = state.scaled_second.flatten(0, 1)
        self.has_third = state.G is not None
        third = [] if state.G is None else [state.scaled_third.flatten(0, 1)]
        self.both = torch.cat([self.second, *third], 1)
        """τ M2 over τ² G, (H·N, 2 d, d): one product gives both."""


class State:
    """Everything (H, N, …) with N = B·L query tokens; g and S carry the factor of the loss and of the reduction."""

    def __init__(self, layer: Layer, loss: Loss) -> None:
        self.layer = layer
        self.tau = layer.tau
        self.x = layer.queries.flatten(0, 1)
        self.q = layer.q
        self.g = loss.gradient.flatten(0, 1)
        self.outer, self.rest = (s.flatten(0, 1) if isinstance(s, Tensor) else s for s in (loss.outer, loss.rest))
        self.total: Curvature = _sum(self.outer, self.rest)
        d = layer.keys.shape[-1]
        require_room(
            3 * layer.heads * self.x.shape[0] * d * d,
            self.x,
            "What is known of the moments of all tokens",
            "A product needs no moments where keys are few: wrt='QKVX' and `matvec`; or give fewer samples at a time.",
        )
        self.u = self.g @ layer.WV.mT
        self.m, self.M2, self.p, self.G = self._softmax() if layer.kind == "softmax" else self._linear()

    def _softmax(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        layer = self.layer
        heads, (samples, rows) = layer.heads, layer.queries.shape[:2]
        attention = layer.attention.transpose(0, 1).flatten(1, 2)  # (B, H·L, L_k): the keys are the same for all heads
        u = self.u.view(heads, samples, rows, -1).transpose(0, 1).flatten(1, 2)
        parts = contracted(attention, layer.keys, u)

        def by_head(tensor: Tensor) -> Tensor:
            return tensor.view(samples, heads, rows, *tensor.shape[2:]).transpose(0, 1).flatten(1, 2)

        return by_head(parts.mean), by_head(parts.second), by_head(parts.first_order), by_head(parts.third)

    def _linear(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        layer = self.layer
        rows = layer.queries.shape[1]
        if layer.allowed is None:
            second = (layer.keys.mT @ layer.keys)[:, None].expand(-1, rows, -1, -1)
        else:
            second = uncentred(layer.keys, layer.allowed.to(layer.keys.dtype).expand(layer.samples, -1, -1))
        second = second.flatten(0, 1).expand(layer.heads, -1, -1, -1)
        return (
            torch.einsum("hnab,hnb->hna", second, layer.kappa),
            second,
            torch.einsum("hnab,hnb->hna", second, self.u),
            None,
        )

    @cached_property
    def for_products(self) -> ForProducts:
        """What a product needs at every vector."""
        return ForProducts(self)

    @cached_property
    def scaled_second(self) -> Tensor:
        """τ M2."""
        return self.tau * self.M2

    # What blocks are made of

    @cached_property
    def MV(self) -> Tensor:
        """M2 W_V, (H, N, d, d_out)."""
        return _right(self.M2, self.layer.WV)

    @cached_property
    def MK(self) -> Tensor:
        """τ M2 W_K, (H, N, d, d_K)."""
        if self.layer.WK is None:
            return self.scaled_second
        return self.tau * _right(self.M2, self.layer.WK)

    @cached_property
    def CT(self) -> Tensor:
        """Cᵀ = τ W_Kᵀ M2 W_V, (H, N, d_K, d_out): the Jacobian of f_i by W_Q is x_iᵀ ⊗ C_i."""
        return _right(self.MK.mT, self.layer.WV)

    @cached_property
    def DT(self) -> Tensor:
        """Dᵀ = τ M2 W_V, (H, N, d, d_out): the Jacobian of f_i by W_K is D_i ⊗ q_iᵀ."""
        return self.tau * self.MV

    @cached_property
    def B(self) -> Tensor:
        """X_qᵀ p = X_qᵀ W X, (H, d_q, d): the gradient by the product W_Q W_Kᵀ is τ B."""
        return self.x.mT @ self.p

    @cached_property
    def _vectors(self) -> dict[str, tuple[Tensor, ...]]:
        # taken apart once: terms with the same vector are merged, and the same means the same object
        layer = self.layer
        found = {"Q": (self.x,) * layer.heads, "K": tuple(self.q), "V": tuple(self.m)}
        return found if layer.up is None else {**found, "O": tuple(self.m @ layer.down)}

    def vector(self, letter: str, head: int) -> Tensor:
        """u of the Jacobian u_i ⊗ M_i by one weight matrix, (N, ·): x by W_Q, q by W_K, m by W_V, m W_V by W_O."""
        return self._vectors[letter][head]

    def jacobian(self, letter: str, head: int) -> Tensor | None:
        """M of the Jacobian u_i ⊗ M_i by one weight matrix: (N, ·, d_out), the same for all tokens, or None for I."""
        if letter == "Q":
            return self.CT[head]
        if letter == "K":
            return self.DT[head]
        return self.layer.up[head] if letter == "V" and self.layer.up is not None else None

    @cached_property
    def scaled_third(self) -> Tensor:
        """τ² G, (H, N, d, d)."""
        assert self.G is not None
        return self.tau**2 * self.G

    @cached_property
    def GK(self) -> Tensor:
        """τ² W_Kᵀ G, (H, N, d_K, d)."""
        weight = self.layer.WK
        return self.scaled_third if weight is None else _right(self.scaled_third, weight).mT


def _right(matrices: Tensor, weights: Tensor) -> Tensor:
    """M W for (H, N, a, b) matrices and (H, b, c) weights: one product a head, not one a token."""
    heads, count, rows, _ = matrices.shape
    return (matrices.reshape(heads, count * rows, -1) @ weights).view(heads, count, rows, -1)


def _sum(first: Curvature, second: Curvature) -> Curvature:
    if isinstance(first, Tensor) == isinstance(second, Tensor):
        return first + second
    tensor, number = (first, second) if isinstance(first, Tensor) else (second, first)
    assert isinstance(tensor, Tensor)
    assert isinstance(number, float)
    if number == 0:
        return tensor
    return tensor + number * torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
