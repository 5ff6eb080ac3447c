"""The Hessian of an attention layer in closed form: blocks, norms, traces, products, its finer split and its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.blocks import Blocks, Slot, scores, slots
from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.attention.kernel import RankBound, gauge, rank_bound
from curvlens.calculus.attention.products import Products
from curvlens.calculus.attention.state import State
from curvlens.calculus.form import Form, Key, Split, SplitPart
from curvlens.calculus.moments import Moments, moments
from curvlens.calculus.output_loss import OutputLoss
from curvlens.calculus.own_dtype import calculated, in_own_dtype
from curvlens.calculus.room import require_room
from curvlens.calculus.terms import Pair, Term
from curvlens.errors import CurvlensError


class AttentionHessian(Split):
    """H = outer + functional for a loss of an attention layer's output, with respect to its weights (and tokens).

    ``.outer``, ``.functional`` and ``.total`` are `Form`s: ``H.outer["Q", "K"]`` is a block, ``H.total.dense()`` the
    whole.
    """

    def __init__(
        self, of: AttentionInputs, loss: OutputLoss, wrt: Sequence[str], batch: Sequence[int], *, named: bool
    ) -> None:
        self._layer, self._loss = of, loss
        self._batch, self._named = tuple(batch), named
        tokens = [letter for letter in ("X", "C") if letter in wrt]
        self._slots: dict[str, Slot] = {}
        single = of.WK is None
        for slot in slots(of):
            if (slot.letter if slot.letter != "O" else "V") in wrt:
                letter = "QK" if single and slot.letter == "Q" else slot.letter
                self._slots[f"{letter}{slot.head}" if named else letter] = slot
        shapes = {name: slot.shape for name, slot in self._slots.items()}
        for letter in tokens:
            source = of.queries if letter == "X" else of.keys
            shapes[letter] = (source.shape[0] * source.shape[1], source.shape[2])
        self._shapes = shapes
        self._blocks = Blocks(of, loss, self._slots)
        self._products = Products(self._blocks, tokens, shapes)

    @cached_property
    def layer(self) -> AttentionInputs:
        """The arguments in a common format: tokens, weights, and which query may attend to which key."""
        with torch.inference_mode(False):
            return self._layer.copy()

    @cached_property
    def loss(self) -> OutputLoss:
        """Gradient and curvature at every output token."""
        with torch.inference_mode(False):
            return self._loss.copy()

    @calculated
    def outer(self) -> Form:
        """Jᵀ S J."""
        return self._make("outer", "Outer part of the attention Hessian")

    @calculated
    def functional(self) -> Form:
        """⟨g, ∂²F⟩, plus the second of a pair of curvatures, if one was given."""
        return self._make("functional", "Functional part of the attention Hessian")

    @calculated
    def total(self) -> Form:
        """H."""
        return self._make("total", "Attention Hessian")

    def _make(self, part: SplitPart, title: str) -> Form:
        return Form(self._shapes, partial(self._products.terms, part=part), self._layer.queries, title)

    def __repr__(self) -> str:
        of = self._layer
        what = ("masked " if of.allowed is not None else "") + ("cross-attention" if of.crossed else "self-attention")
        return (
            f"AttentionHessian({of.kind} {what}, {of.heads} head{'s' if of.heads > 1 else ''}, {of.samples} sample"
            f"{'s' if of.samples > 1 else ''} of {of.queries.shape[1]} tokens; blocks "
            + ", ".join(f"{name} {a}×{b}" for name, (a, b) in self.total.shapes.items())
            + f"; {self.total.size} × {self.total.size})"
        )

    @property
    def _state(self) -> State:
        return self._blocks.state

    # Numbers that do not need the dense matrix

    def norm(self, block: Key | None = None, part: SplitPart = "total") -> float:
        """The exact Frobenius norm of a block (``"Q"`` or ``("Q", "K")``) or of the whole."""
        form = self._form(part)
        if part == "total" and block is not None and not self.functional.terms(*form.pair(block)):
            form = self.outer  # the functional part of this block is zero
        return form.norm(block)

    @in_own_dtype
    def matvec(self, v: Tensor, part: SplitPart = "total") -> Float[Tensor, "n ..."]:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        return self._products(self._form(part).checked(v), part)

    @property
    @in_own_dtype
    def moments(self) -> Moments:
        """Mean, covariance and third central moment of the keys under every attention row: M1, M2 and M3.

        (heads, samples, L, d), (…, d, d) and (…, d, d, d), without axes that were not given. M3 has L d³ numbers for
        each head and sample.
        """
        if self._layer.kind != "softmax":
            raise CurvlensError("Linear attention has no rows that are distributions, hence no moments.")
        of = self._layer
        rows, keys, width = of.heads * of.samples * of.queries.shape[1], of.keys.shape[1], of.keys.shape[2]
        require_room(
            rows * (width**3 + keys * width * width),
            of.queries,
            "M3, with what it is summed from,",
            "`curvlens.calculus.moments.contracted` has M1, M2, and M3 along a vector.",
        )
        found = moments(of.attention, of.keys.expand(of.heads, *of.keys.shape))
        lead = (of.heads, *self._batch) if self._named else self._batch
        return Moments(*(m.reshape(*lead, *m.shape[2:]) for m in found))

    # The finer split of the query-key part, Remark D.1

    def _query_key(self, head: int | None) -> tuple[str, str]:
        if self._layer.WK is None:
            raise CurvlensError("One matrix W_QK is not split at the scores: that needs W_Q and W_K.")
        heads = self._layer.heads
        if head is None and heads > 1:
            raise CurvlensError(f"There are {heads} heads: say which, as in head=0.")
        if head is not None and not (isinstance(head, int) and 0 <= head < heads):
            known = f"are heads 0 to {heads - 1}" if heads > 1 else "is one head, 0"
            raise CurvlensError(f"head={head!r}; there {known}.")
        wanted = [n for n, slot in self._slots.items() if slot.letter in "QK" and slot.head == (head or 0)]
        if len(wanted) != 2:
            raise CurvlensError(
                f"The split at the scores needs Q and K of head {head or 0}; the blocks are {', '.join(self._slots)}."
            )
        return (wanted[0], wanted[1])

    def t_outer(self, head: int | None = None) -> Form:
        """The Gauss–Newton part of the (Q, K) Hessian split at the scores T: τ² Vᵀ U V (Remark D.1)."""
        shapes = {name: self._slots[name].shape for name in self._query_key(head)}
        return Form(shapes, partial(_t_outer, self._blocks), self._layer.queries, "T-outer part")

    def t_functional(self, head: int | None = None) -> Form:
        """The part that comes from W_Q W_Kᵀ being a product: τ [[0, B], [Bᵀ, 0]] ⊗ I (Remark D.1).

        Its eigenvalues are ±τ times the singular values of B, each d_K times.
        """
        shapes = {name: self._slots[name].shape for name in self._query_key(head)}
        return Form(shapes, partial(_t_functional, self._blocks), self._layer.queries, "T-functional part")

    def rank_bound(self, head: int | None = None) -> RankBound:
        """Bounds on the rank of the T-outer part."""
        self._query_key(head)
        return rank_bound(self._blocks.known[0], head or 0)

    @in_own_dtype
    def gauge(self) -> Float[Tensor, "n k"]:
        """Directions in which F does not change, as columns (size, ·): the kernel of the outer and the T-outer part.

        (W_Q Ξ, −W_K Ξᵀ) does not change W_Q W_Kᵀ, and (W_V Ξ, −Ξ W_O) does not change the product of a low-rank value:
        d_K² and r² directions for each head.
        """
        return gauge(self._layer, {(slot.letter, slot.head): n for n, slot in self._slots.items()}, self.total)


def _t_outer(blocks: Blocks, first: str, second: str) -> list[Term]:
    found = blocks.terms(first, second, "total")
    return [term for term in found if not isinstance(term, Pair)]  # the pairs are the T-functional part


def _t_functional(blocks: Blocks, first: str, second: str) -> list[Term]:
    return [] if first == second else [scores(blocks.state, blocks.slots[first].head)]
