"""The blocks of the weights, as terms (`docs/explanation/math.md`, "Attention: blocks").

The Jacobian of f_i by one weight matrix is a vector times a matrix: by W_Q it is x_i[a] C_i[b, d], by W_K it is D_i[b,
a] q_i[d], by W_V it is m_i[a] δ_bd; the factors of a low-rank value have the same form. So an outer block is Σ_i u_i
w_i (M_i S_i M'_iᵀ), and the functional blocks have the same form too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.attention.potential import Side
from curvlens.calculus.attention.state import State
from curvlens.calculus.curvature import OutputCurvature, Root, counts, is_zero, rows
from curvlens.calculus.form import SplitPart
from curvlens.calculus.output_loss import OutputLoss
from curvlens.calculus.own_dtype import calculated
from curvlens.calculus.terms import Pair, Term, Tokens, factored


class Slot(NamedTuple):
    """One weight matrix: ∂f_i/∂W[a, d] = u_i[a] M_i[d], or M_i[a] u_i[d] for a key matrix."""

    letter: str
    head: int
    shape: tuple[int, int]


def axes(first: Slot, second: Slot) -> tuple[str, str, str]:
    """The axes of u and w of two matrices in their block [a, d, c, e], and of the matrix between them."""
    if first.letter == "K":
        return ("d", "e", "ac") if second.letter == "K" else ("d", "c", "ae")
    return ("a", "e", "dc") if second.letter == "K" else ("a", "c", "de")


def slots(layer: AttentionInputs) -> list[Slot]:
    """The weight matrices, head by head: Q, K, V and, for a low-rank value, O."""
    weights = {"Q": layer.WQ, "K": layer.WK, "V": layer.down, "O": layer.up}
    return [
        Slot(letter, head, (weight.shape[1], weight.shape[2]))
        for head in range(layer.heads)
        for letter, weight in weights.items()
        if weight is not None
    ]


class Blocks:
    """The blocks of a layer's weights by name, and the state from which all of them are computed.

    It has no reference to the forms that use it: in a reference cycle, large tensors would stay in memory too long.
    """

    def __init__(self, layer: AttentionInputs, loss: OutputLoss, slots: Mapping[str, Slot]) -> None:
        self.layer, self.loss, self.slots = layer, loss, slots

    @calculated
    def known(self) -> tuple[AttentionInputs, OutputLoss]:
        """Layer and loss without the tokens that the loss does not depend on: their blocks are zero."""
        layer, loss, parts = self.layer, self.loss, (self.loss.outer, self.loss.rest)
        if all(is_zero(s) or not isinstance(s, float) for s in parts):
            knows = (loss.gradient != 0).any(-1) | counts(parts[0]) | counts(parts[1])
            keep = knows.any(0).nonzero()[:, 0]
            if 0 < len(keep) < knows.shape[1]:
                layer, knows = layer.rows(keep), knows[:, keep]
                loss = OutputLoss(loss.gradient[:, keep], *(rows(s, keep) for s in parts))
            if len(keep) and not bool(knows.all()):
                layer = layer.only(knows)
        return layer, loss

    @calculated
    def state(self) -> State:
        """The tensors from which every block is computed."""
        with torch.inference_mode():
            return State(*self.known)

    def terms(self, first: str, second: str, part: SplitPart) -> list[Term]:
        """The terms of the block of two weight matrices; the second does not come before the first."""
        return terms(self.state, self.slots[first], self.slots[second], part)


def terms(state: State, first: Slot, second: Slot, part: SplitPart) -> list[Term]:
    """The block of two weight matrices; the second does not come before the first."""
    if part == "outer":
        return outer(state, first, second, state.outer)
    if part == "total" and first.head == second.head and (both := _both(state, first, second)):
        return both
    own = functional(state, first, second) if first.head == second.head else []
    return [*outer(state, first, second, state.total if part == "total" else state.rest), *own]


def outer(state: State, first: Slot, second: Slot, curvature: OutputCurvature) -> list[Term]:
    """Σ_i J_iᵀ S_i J_i."""
    if is_zero(curvature):
        return []
    key = (first.letter, first.head, second.letter, second.head, id(curvature))
    if key not in state.outer_terms:
        state.outer_terms[key] = [_outer(state, first, second, curvature)]
    return state.outer_terms[key]


def _outer(state: State, first: Slot, second: Slot, curvature: OutputCurvature) -> Term:
    u, w = state.vector(first.letter, first.head), state.vector(second.letter, second.head)
    on_u, on_w, on_matrix = axes(first, second)
    same = first is second
    if isinstance(curvature, Root):
        seen = state.jacobian_times(first.letter, first.head, curvature)
        other = seen if same else state.jacobian_times(second.letter, second.head, curvature)
        return Tokens(u, w, factored(seen, other), on_u, on_w, on_matrix, same)
    if isinstance(curvature, Tensor):
        left, right = (state.jacobian(slot.letter, slot.head) for slot in (first, second))
        sandwich = curvature if left is None else left @ curvature
        sandwich = sandwich if right is None else sandwich @ right.mT
        return Tokens(u, w, sandwich, on_u, on_w, on_matrix, same)
    left = state.scaled_jacobian(first.letter, first.head, curvature)
    if left is None:
        right = state.scaled_jacobian(second.letter, second.head, curvature)
        middle = None if right is None else right.mT
    else:
        right = state.jacobian(second.letter, second.head)
        middle = left if right is None else left @ right.mT
    if middle is None:
        return Pair((curvature * u).mT @ w, None, on_u + on_w, on_matrix, first.shape["ad".index(on_matrix[0])])
    if middle.ndim == 2:  # equal for all tokens
        return Pair(u.mT @ w, middle, on_u + on_w, on_matrix, first.shape["ad".index(on_matrix[0])])
    return Tokens(u, w, middle, on_u, on_w, on_matrix, same)


def _both(state: State, first: Slot, second: Slot) -> list[Term]:
    """Both parts of query and key matrices together, if the loss has the same curvature c·I at every token."""
    if first.letter + second.letter not in ("QQ", "KK", "QK") or not state.potential.has_third:
        return []
    if not isinstance(state.total, float) or is_zero(state.total):
        return []
    u, w = state.vector(first.letter, first.head), state.vector(second.letter, second.head)
    matrix = state.potential.curved(state.total, _side(first), _side(second))[first.head]
    found = Tokens(u, w, matrix, *axes(first, second), first is second)
    return [found] if first is second else [found, scores(state, first.head)]


def _side(slot: Slot) -> Side:
    """The matrix between a query or key matrix and the potential."""
    return "K" if slot.letter == "Q" else "X"


def functional(state: State, first: Slot, second: Slot) -> list[Term]:
    """⟨g, ∂²F⟩ of two matrices of one head; zero between values, and between heads."""
    layer, phi, h = state.layer, state.potential, first.head
    pair = first.letter + second.letter
    u = state.vector(first.letter, h)
    if pair in ("QQ", "KK", "QK"):
        found: list[Term] = []
        if phi.has_third:
            third = phi.third_of(h, _side(first), _side(second))
            found.append(Tokens(u, state.vector(second.letter, h), third, *axes(first, second), first is second))
        if pair == "QK":
            found.append(scores(state, h))
        return found
    if pair == "VO":
        return [Pair(phi.mean[h].mT @ state.g, None, "ae", "dc", first.shape[1])]
    if second.letter not in "VO" or first.letter not in "QK":
        return []
    moment = phi.second("X", _side(first))[h]
    if second.letter == "V":
        cotangent = state.g if layer.up is None else state.g @ layer.up[h].mT
    else:
        cotangent, moment = state.g, layer.down[h].mT @ moment
    on_u, _, on_matrix = axes(first, second)
    return [Tokens(u, cotangent, moment, on_u, "e", "c" + on_matrix[0])]


def scores(state: State, head: int) -> Pair:
    """τ B ⊗ I_{d_K}, which the block (Q, K) has because W_Q W_Kᵀ is a product: the T-functional part (Remark D.1)."""
    return Pair(state.tau * state.B[head], None, "ac", "de", state.layer.WQ.shape[2])
