"""The tensors from which every block of the Hessian is computed, one row for each query token."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.attention.potential import potential
from curvlens.calculus.curvature import Root, flat, plus
from curvlens.calculus.output_loss import OutputLoss
from curvlens.calculus.own_dtype import calculated
from curvlens.calculus.terms import Term


class State:
    """Tensors (H, N, …) with N = B·L query tokens. g and S include the factors of the loss and of the reduction."""

    def __init__(self, layer: AttentionInputs, loss: OutputLoss) -> None:
        self.layer = layer
        self.tau = layer.tau
        self.x = layer.queries.flatten(0, 1)
        self.g = loss.gradient.flatten(0, 1)
        self.outer, self.rest = (flat(s) for s in (loss.outer, loss.rest))
        self.total = plus(self.outer, self.rest)
        self.potential = potential(layer, self.g)
        self._scaled: dict[tuple[str, int, float], Tensor | None] = {}
        self.outer_terms: dict[Any, list[Term]] = {}
        """Outer blocks that were computed: the total needs them again."""

    @calculated
    def B(self) -> Float[Tensor, "h p q"]:
        """X_qᵀ p = X_qᵀ W X, (H, d_q, d): the gradient by the product W_Q W_Kᵀ is τ B."""
        return torch.bmm(self.x.mT.expand(self.layer.heads, -1, -1), self.potential.first_order)

    @calculated
    def _vectors(self) -> dict[str, tuple[Tensor, ...]]:
        # split once: terms with the same vector are merged, and "same" means the same object
        layer, m = self.layer, self.potential.mean
        found = {"Q": (self.x,) * layer.heads, "K": layer.q.unbind(), "V": m.unbind()}
        return found if layer.up is None else {**found, "O": (m @ layer.down).unbind()}

    def vector(self, letter: str, head: int) -> Float[Tensor, "n p"]:
        """u of the Jacobian u_i ⊗ M_i by one weight matrix, (N, ·): x by W_Q, q by W_K, m by W_V, m W_V by W_O."""
        return self._vectors[letter][head]

    def jacobian(self, letter: str, head: int) -> Float[Tensor, "*n p o"] | None:
        """M of the Jacobian u_i ⊗ M_i by one weight matrix: (N, ·, d_out), or (·, d_out) for all tokens; None for I.

        τ W_Kᵀ M2 W_V for W_Q and τ M2 W_V for W_K; W_O for a W_V of low rank.
        """
        if letter in "QK":
            return self.potential.second("K" if letter == "Q" else "X", "V")[head]
        return self.layer.up[head] if letter == "V" and self.layer.up is not None else None

    def scaled_jacobian(self, letter: str, head: int, scale: float) -> Tensor | None:
        """scale · M."""
        key = (letter, head, scale)
        if key not in self._scaled:
            matrix = self.jacobian(letter, head)
            self._scaled[key] = None if matrix is None else scale * matrix
        return self._scaled[key]

    def jacobian_times(self, letter: str, head: int, root: Root) -> Float[Tensor, "n p r"]:
        """M R, for a root of the curvature, (N, ·, r)."""
        if letter in "QK":
            return self.potential.second_times("K" if letter == "Q" else "X", "V", root.R)[head]
        matrix = self.jacobian(letter, head)
        return root.R if matrix is None else matrix @ root.R
