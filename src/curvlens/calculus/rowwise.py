"""Layers that act on every token separately: the Hessian of a loss of their output, as sums over tokens.

The Jacobian of a token's output f_n by one weight matrix is a vector times a matrix, ∂f_n/∂W[a, d] = u_n[a] M_n[d]. For
the tokens themselves u_n is a unit vector. An outer block is Σ_n u_n w_n (M_n S_n M'_nᵀ), and functional blocks have
the same form (`docs/explanation/math.md`, "Feed-forward" and "Norms").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.curvature import OutputCurvature, Root, flat, is_zero, plus
from curvlens.calculus.form import Form, Split
from curvlens.calculus.output_loss import OutputLoss
from curvlens.calculus.terms import Pair, Term, Tokens, factored

Functional = Callable[[str, str], list[Term]]
"""The functional terms of the block of two names; the second does not come before the first."""


@dataclass(frozen=True)
class Slot:
    """A weight matrix, or the tokens: ∂f_n/∂W[a, d] = u_n[a] M_n[d]."""

    shape: tuple[int, int]
    u: Tensor
    """(N, rows)."""
    jacobian: Tensor | None
    """M, (N, columns, d_out); (columns, d_out) if it is equal for all tokens; None for the identity."""


class RowwiseHessian(Split):
    """H = outer + functional for a loss of the output of a layer that acts on every token separately.

    ``.outer``, ``.functional`` and ``.total`` are `Form`s: ``H.outer["up", "down"]`` is a block, ``H.total.dense()``
    the whole.
    """

    def __init__(self, slots: Mapping[str, Slot], functional: Functional, loss: OutputLoss, title: str) -> None:
        self._slots, self._functional, self._title = dict(slots), functional, title
        self._outer, self._rest = flat(loss.outer), flat(loss.rest)
        self._like = loss.gradient

    def __repr__(self) -> str:
        return repr(self.total)

    @cached_property
    def outer(self) -> Form:
        """Jᵀ S J."""
        return self._make(self._outer, None, "Outer part of the Hessian")

    @cached_property
    def functional(self) -> Form:
        """⟨g, ∂²f⟩, plus the part of the curvature that is not Gauss–Newton."""
        return self._make(self._rest, self._functional, "Functional part of the Hessian")

    @cached_property
    def total(self) -> Form:
        """H."""
        return self._make(plus(self._outer, self._rest), self._functional, "Hessian")

    def _make(self, curvature: OutputCurvature, functional: Functional | None, what: str) -> Form:
        slots = self._slots

        def terms(first: str, second: str) -> list[Term]:
            own = [] if functional is None else functional(first, second)
            return [*_sandwich(slots[first], slots[second], curvature), *own]

        return Form({name: slot.shape for name, slot in slots.items()}, terms, self._like, f"{what} {self._title}")


def _sandwich(one: Slot, other: Slot, curvature: OutputCurvature) -> list[Term]:
    """Σ_n J_nᵀ S_n J_n."""
    if is_zero(curvature):
        return []
    left, right = one.jacobian, other.jacobian
    if isinstance(curvature, float):
        middle = left if right is None else right.mT if left is None else left @ right.mT
        if middle is None or middle.ndim == 2:  # equal for all tokens
            return [Pair((curvature * one.u).mT @ other.u, middle, "ac", "de", one.shape[1])]
        return [Tokens(one.u, other.u, curvature * middle, "a", "c", "de", one is other)]
    if isinstance(curvature, Root):
        seen = curvature.R if left is None else left @ curvature.R
        also = seen if one is other else curvature.R if right is None else right @ curvature.R
        return [Tokens(one.u, other.u, factored(seen, also), "a", "c", "de", one is other)]
    start = curvature if left is None else left @ curvature
    return [Tokens(one.u, other.u, start if right is None else start @ right.mT, "a", "c", "de", one is other)]


def units(tokens: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """The unit vectors e_n, (N, N): u_n if the tokens are the variables."""
    return torch.eye(len(tokens), dtype=tokens.dtype, device=tokens.device)
