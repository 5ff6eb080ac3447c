"""Derivatives of the potential Φ_i of every query token, multiplied with the weights.

The output of token i is f_i = W_Vᵀ ∇Φ_i(κ_i), κ_i = τ W_K W_Qᵀ x_i. For softmax attention Φ_i is a log-sum-exp, and its
derivatives are the attention moments. For linear attention Φ_i(κ) = ½ κᵀ Ξ_i κ with Ξ_i = Σ_j x_j x_jᵀ over the keys
that it may see. Needed are m = ∇Φ, M2 = ∇²Φ and, contracted with u = W_V g, p = M2 u and G = ∇³Φ[u].

M2 and G are sums over the keys. With many keys, M2 and G are built and multiplied with the weights. With fewer keys
than features they have low rank, and are sums over keys that were first multiplied with the weights.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.moments import contracted_rows, deviations, uncentred
from curvlens.calculus.room import require_room
from curvlens.calculus.terms import Factored, factored

Side = Literal["X", "K", "V"]
"""The matrix P that one side was multiplied with: the identity, W_K or W_V."""


CURVED = 4
"""The key for sums of both orders, M2 and G, in the cache."""


class Potential:
    """The derivatives of Φ at the N = B·L query tokens of every head."""

    def __init__(self, layer: AttentionInputs) -> None:
        self.layer = layer
        self._weights: dict[Side, Tensor | None] = {"X": None, "K": layer.WK, "V": layer.WV}
        self._known: dict[Side, Side] = {"X": "X", "K": "K" if layer.WK is not None else "X", "V": "V"}
        """The name of a side in the cache. With one matrix W_QK there is no W_K, and "K" is "X"."""
        self._found: dict[tuple[int, Side, Side], Tensor] = {}

    @property
    def mean(self) -> Float[Tensor, "h n d"]:
        """m, (H, N, d)."""
        return self.layer.mean

    @property
    def first_order(self) -> Float[Tensor, "h n d"]:
        """p = M2 u, (H, N, d)."""
        raise NotImplementedError

    @property
    def has_third(self) -> bool:
        """Whether G is not zero. It is zero for linear attention."""
        return self.layer.kind == "softmax"

    def second(self, left: Side, right: Side) -> Float[Tensor, "h n p q"]:
        """τ Pᵀ M2 P', (H, N, ·, ·)."""
        return self._matrix(2, left, right)

    def third(self, left: Side, right: Side) -> Float[Tensor, "h n p q"]:
        """τ² Pᵀ G P', (H, N, ·, ·)."""
        return self._matrix(3, left, right)

    def third_of(self, head: int, left: Side, right: Side) -> Float[Tensor, "n p q"] | Factored:
        """The same for one head, (N, ·, ·), perhaps as factors."""
        return self.third(left, right)[head]

    def curved(self, curvature: float, left: Side, right: Side) -> Float[Tensor, "h n p q"]:
        """τ² Pᵀ (c M2 W_V W_Vᵀ M2 + G) P', (H, N, ·, ·): both parts of the Hessian, if S_i = c·I for all tokens."""
        third, first, second = self.third(left, right), self.second(left, "V"), self.second(right, "V")
        parts = (part.flatten(0, 1) for part in (third, first, second.mT))
        return torch.baddbmm(*parts, alpha=curvature).view(third.shape)

    def second_times(self, left: Side, right: Side, columns: Float[Tensor, "n q r"]) -> Float[Tensor, "h n p r"]:
        """τ Pᵀ M2 P' R, (H, N, ·, r), for R (N, ·, r)."""
        return self.second(left, right) @ columns

    def _matrix(self, order: int, left: Side, right: Side) -> Tensor:
        key = (order, self._known[left], self._known[right])
        if key not in self._found:
            mirrored = self._found.get((order, key[2], key[1]))
            self._found[key] = self._sum(*key) if mirrored is None else mirrored.mT
        return self._found[key]

    def _sum(self, order: int, left: Side, right: Side) -> Tensor:
        raise NotImplementedError


class ManyKeys(Potential):
    """Builds M2 and G, then multiplies them with the weights."""

    def __init__(self, layer: AttentionInputs, u: Tensor) -> None:
        super().__init__(layer)
        width, tokens = layer.keys.shape[2] ** 2, layer.keys.shape[0] * layer.keys.shape[1]
        # M2 and G in pieces, whole and scaled; or Ξ, Ξ scaled, and x_j x_jᵀ of every key
        _room(layer, *((6 * width,) if layer.kind == "softmax" else (2 * width, tokens * width)))
        tau, found = layer.tau, self._found
        if layer.kind == "linear":
            second = self._uncentred()
            self._mean = torch.einsum("hnab,hnb->hna", second, layer.kappa)
            self._first_order = torch.einsum("hnab,hnb->hna", second, u)
            found[2, "X", "X"] = tau * second
            return
        heads, (samples, rows) = layer.heads, layer.queries.shape[:2]
        if heads == 1:
            flat = contracted_rows(layer.attention[0], layer.keys, u.view(samples, rows, -1), tau)
            parts = tuple(part.unsqueeze(0) for part in flat)
        else:  # all heads have the same keys
            attention = layer.attention.transpose(0, 1).flatten(1, 2)
            u = u.view(heads, samples, rows, -1).transpose(0, 1).flatten(1, 2)
            flat = contracted_rows(attention, layer.keys, u, tau)
            parts = tuple(
                part.view(samples, heads, rows, *part.shape[1:]).transpose(0, 1).flatten(1, 2) for part in flat
            )
        found[2, "X", "X"], self._first_order, found[3, "X", "X"] = parts

    @property
    def mean(self) -> Float[Tensor, "h n d"]:
        """m, (H, N, d). For linear attention Ξ κ, which needs no memory for A."""
        return self._mean if self.layer.kind == "linear" else self.layer.mean

    @property
    def first_order(self) -> Float[Tensor, "h n d"]:
        """p = M2 u, (H, N, d)."""
        return self._first_order

    def _uncentred(self) -> Tensor:
        """Ξ, (H, N, d, d)."""
        layer = self.layer
        if layer.allowed is None:
            second = (layer.keys.mT @ layer.keys)[:, None].expand(-1, layer.queries.shape[1], -1, -1)
        else:
            second = uncentred(layer.keys, layer.allowed.to(layer.keys.dtype).expand(layer.samples, -1, -1))
        return second.flatten(0, 1).expand(layer.heads, -1, -1, -1)

    def _sum(self, order: int, left: Side, right: Side) -> Tensor:
        if (left, right) in (("X", "K"), ("V", "X")):  # symmetric: Pᵀ M is (M P)ᵀ
            return self._matrix(order, right, left).mT
        if right == "X":
            weights, start = self._weights[left], self._matrix(order, "X", "X")
            assert weights is not None
            if len(start) == 1:
                return torch.bmm(weights.mT.expand(start.shape[1], -1, -1), start[0])[None]
            out = start.new_empty(*start.shape[:2], weights.shape[2], start.shape[3])
            for head in range(len(start)):
                torch.bmm(weights[head].mT.expand(start.shape[1], -1, -1), start[head], out=out[head])
            return out
        weights, start = self._weights[right], self._matrix(order, left, "X")
        assert weights is not None
        return torch.bmm(start.flatten(1, 2), weights).view(*start.shape[:3], -1)

    def curved(self, curvature: float, left: Side, right: Side) -> Float[Tensor, "h n p q"]:
        """τ² Pᵀ (c M2 W_V W_Vᵀ M2 + G) P', (H, N, ·, ·): first the sum, then its products with the weights."""
        if (CURVED, "X", "X") not in self._found:
            self._found[CURVED, "X", "X"] = super().curved(curvature, "X", "X")
        return self._matrix(CURVED, left, right)


class FewKeys(Potential):
    """Sums over the keys: Σ_j a_j (Pᵀ y_j)(P'ᵀ y_j)ᵀ with y_j = x_j − m, a_j = A_ij in M2 and A_ij u·y_j in G."""

    def __init__(self, layer: AttentionInputs, g: Tensor) -> None:
        super().__init__(layer)
        self._g = g.view(*layer.queries.shape[:2], 1, -1)
        self._sides: dict[Side, Tensor] = {}
        if layer.kind == "softmax":
            self._weight = layer.attention
        else:
            allowed = layer.keys.new_ones(1) if layer.allowed is None else layer.allowed.to(layer.keys.dtype)
            self._weight = allowed.expand(layer.heads, *layer.queries.shape[:2], layer.keys.shape[1])

    @cached_property
    def first_order(self) -> Float[Tensor, "h n d"]:
        """p = M2 u, (H, N, d)."""
        return (self._contracted.mT @ self._side("X")).squeeze(-2).flatten(1, 2)

    @cached_property
    def _contracted(self) -> Tensor:
        """A_ij u·y_j = A_ij g·W_Vᵀ y_j, (H, B, L, L_k, 1)."""
        return self._weight[..., None] * (self._side("V") * self._g).sum(-1, keepdim=True)

    def _side(self, side: Side) -> Tensor:
        """Pᵀ y_j, (H, B, L, L_k, ·)."""
        if side not in self._sides:
            layer, weights = self.layer, self._weights[side]
            linear = layer.kind == "linear"
            # a large common offset is removed before the product, so that it does not cancel later
            x = layer.centred
            keys = x.expand(layer.heads, -1, -1, -1) if weights is None else x @ weights[:, None]
            _room(layer, keys.shape[-2] * keys.shape[-1])
            self._sides[side] = keys[:, :, None] if linear else deviations(layer.attention, keys)
        return self._sides[side]

    def _sum(self, order: int, left: Side, right: Side) -> Tensor:
        first, second = self._factors(order, left, right)
        _room(self.layer, first.shape[-1] * second.shape[-1])
        return (first.mT @ second).flatten(1, 2)

    def _factors(self, order: int, left: Side, right: Side) -> tuple[Tensor, Tensor]:
        """Both sides, the first one weighted: (H, B, L, L_k, ·)."""
        tau = self.layer.tau
        weight = tau * self._weight[..., None] if order == 2 else tau**2 * self._contracted
        return weight * self._side(left), self._side(right)

    def third_of(self, head: int, left: Side, right: Side) -> Float[Tensor, "n p q"] | Factored:
        """τ² Pᵀ G P' of one head, as factors with one column for each key."""
        sides = self._factors(3, self._known[left], self._known[right])
        first, second = (side[head].flatten(0, 1).mT for side in sides)
        return factored(first, second)

    def second_times(self, left: Side, right: Side, columns: Float[Tensor, "n q r"]) -> Float[Tensor, "h n p r"]:
        """τ Pᵀ M2 P' R, (H, N, ·, r), for R (N, ·, r), without building the matrix between."""
        first, second = self._side(self._known[left]), self._side(right)
        seen = second @ columns.view(*self.layer.queries.shape[:2], *columns.shape[1:])
        return (first.mT @ (self.layer.tau * self._weight[..., None] * seen)).flatten(1, 2)


def potential(layer: AttentionInputs, g: Float[Tensor, "n o"]) -> Potential:
    """The derivatives of Φ for g = ∂ℓ/∂f of every query token, (N, d_out)."""
    few = layer.keys.shape[1] < layer.keys.shape[2]
    return FewKeys(layer, g) if few else ManyKeys(layer, layer.times(g, layer.WV.mT))


def _room(layer: AttentionInputs, numbers: int, more: int = 0) -> None:
    """Raise an error if there is no memory for ``numbers`` for each token and head, and ``more`` in addition."""
    require_room(
        layer.heads * layer.queries.shape[0] * layer.queries.shape[1] * numbers + more,
        layer.queries,
        "What is known of the moments of all tokens",
        "A product needs no moments where keys are few: wrt='QKVX' and `matvec`; or give fewer samples at a time.",
    )
