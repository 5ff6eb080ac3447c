"""What every block of the Hessian is made of, one row a query token: tokens, loss, and derivatives of the potential."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus.attention.curvature import Root, flat, plus
from curvlens.calculus.attention.layer import Layer, Loss
from curvlens.calculus.attention.potential import potential
from curvlens.calculus.terms import Term


class ForProducts:
    """What a product with a vector needs, (H, N, ·) and (H, ·, ·); with one head, without the head axis."""

    def __init__(self, state: State) -> None:
        layer, phi = state.layer, state.potential
        heads = layer.heads

        def bare(tensor: Tensor) -> Tensor:  # products of matrices cost a third of products of batches of one
            return tensor[0] if heads == 1 else tensor

        self.x, self.g = bare(state.x.expand(heads, -1, -1)), bare(state.g.expand(heads, -1, -1))
        self.m, self.b = bare(phi.mean), bare(state.tau * state.B)
        self.wq, self.wv, self.down = bare(layer.WQ), bare(layer.WV), bare(layer.down)
        self.wk = None if layer.WK is None else bare(layer.WK)
        self.up = None if layer.up is None else bare(layer.up)
        self.x_t, self.m_t, self.b_t, self.wv_t = self.x.mT, self.m.mT, self.b.mT, self.wv.mT
        self.wk_t = self.wv_t if self.wk is None else self.wk.mT
        self.second = phi.second("X", "X").flatten(0, 1)
        self.has_third = phi.has_third
        third = [phi.third("X", "X").flatten(0, 1)] if phi.has_third else []
        self.both = torch.cat([self.second, *third], 1)
        """τ M2 over τ² G, (H·N, 2 d, d): one product gives both."""


class State:
    """Everything (H, N, …) with N = B·L query tokens; g and S carry the factor of the loss and of the reduction."""

    def __init__(self, layer: Layer, loss: Loss) -> None:
        self.layer = layer
        self.tau = layer.tau
        self.x = layer.queries.flatten(0, 1)
        self.g = loss.gradient.flatten(0, 1)
        self.outer, self.rest = (flat(s) for s in (loss.outer, loss.rest))
        self.total = plus(self.outer, self.rest)
        self.potential = potential(layer, self.g)
        self.outer_terms: dict[Any, list[Term]] = {}
        """Outer blocks that were asked for: the total needs them again."""

    @cached_property
    def for_products(self) -> ForProducts:
        """What a product needs at every vector."""
        return ForProducts(self)

    # What blocks are made of

    @cached_property
    def B(self) -> Tensor:
        """X_qᵀ p = X_qᵀ W X, (H, d_q, d): the gradient by the product W_Q W_Kᵀ is τ B."""
        return self.x.mT @ self.potential.first_order

    @cached_property
    def _vectors(self) -> dict[str, tuple[Tensor, ...]]:
        # taken apart once: terms with the same vector are merged, and the same means the same object
        layer, m = self.layer, self.potential.mean
        found = {"Q": (self.x,) * layer.heads, "K": tuple(layer.q), "V": tuple(m)}
        return found if layer.up is None else {**found, "O": tuple(m @ layer.down)}

    def vector(self, letter: str, head: int) -> Tensor:
        """u of the Jacobian u_i ⊗ M_i by one weight matrix, (N, ·): x by W_Q, q by W_K, m by W_V, m W_V by W_O."""
        return self._vectors[letter][head]

    def jacobian(self, letter: str, head: int) -> Tensor | None:
        """M of the Jacobian u_i ⊗ M_i by one weight matrix: (N, ·, d_out), the same for all tokens, or None for I.

        τ W_Kᵀ M2 W_V by W_Q and τ M2 W_V by W_K; W_O by a W_V of low rank.
        """
        if letter in "QK":
            return self.potential.second("K" if letter == "Q" else "X", "V")[head]
        return self.layer.up[head] if letter == "V" and self.layer.up is not None else None

    def jacobian_times(self, letter: str, head: int, root: Root) -> Tensor:
        """M R, for a root of the curvature, (N, ·, r)."""
        if letter in "QK":
            return self.potential.second_times("K" if letter == "Q" else "X", "V", root.R)[head]
        matrix = self.jacobian(letter, head)
        return root.R if matrix is None else matrix @ root.R
