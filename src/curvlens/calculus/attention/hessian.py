"""The Hessian of an attention layer in closed form: blocks, norms, traces, products, its finer split and its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlens.calculus.attention.blocks import Part, Slot, scores, slots, terms
from curvlens.calculus.attention.layer import Kind, Layer, Loss, Value, layer, loss
from curvlens.calculus.attention.products import along_tokens, by_moments
from curvlens.calculus.attention.state import State
from curvlens.calculus.form import Form, Key
from curvlens.calculus.moments import Moments, moments
from curvlens.calculus.terms import Given, Pair, Term
from curvlens.errors import CurvlensError

PARTS: tuple[Part, ...] = ("outer", "functional", "total")


class RankBound(NamedTuple):
    """Two upper bounds on the rank of the T-outer part."""

    lemma: int
    """Lemma D.2: 2 d d_K − d_K² for d_K < d, else d²."""
    sharper: int
    """With the ranks of the tokens and the supports of the rows; attained on generic draws."""


class AttentionHessian:
    """H = outer + functional of a loss behind an attention layer, with respect to its weights (and tokens).

    ``.outer``, ``.functional`` and ``.total`` are `Form`s: ``H.outer["Q", "K"]`` is a block, ``H.total.dense()`` the
    whole.
    """

    def __init__(self, of: Layer, loss: Loss, wrt: Sequence[str], batch: Sequence[int], *, named: bool) -> None:
        self.layer, self.loss = of, loss
        self._batch, self._named = tuple(batch), named
        tokens = [letter for letter in ("X", "C") if letter in wrt]
        self._slots: dict[str, Slot] = {}
        single = of.WK is None
        for slot in slots(of):
            if (slot.letter if slot.letter != "O" else "V") in wrt:
                letter = "QK" if single and slot.letter == "Q" else slot.letter
                self._slots[f"{letter}{slot.head}" if named else letter] = slot
        shapes = {name: slot.shape for name, slot in self._slots.items()}
        self._letters = {slot.letter: slot.shape for slot in self._slots.values()}  # the same for every head
        self._sizes = [a * b for a, b in self._letters.values()]
        for letter in tokens:
            source = of.queries if letter == "X" else of.keys
            shapes[letter] = (source.shape[0] * source.shape[1], source.shape[2])
        self._tokens = tokens
        self._shapes = shapes

    @cached_property
    def outer(self) -> Form:
        """Jᵀ S J."""
        return self._make("outer", "Outer part of the attention Hessian")

    @cached_property
    def functional(self) -> Form:
        """⟨g, ∂²F⟩, and what follows the layer if a pair of curvatures says so."""
        return self._make("functional", "Functional part of the attention Hessian")

    @cached_property
    def total(self) -> Form:
        """H."""
        return self._make("total", "Attention Hessian")

    def _make(self, part: Part, title: str) -> Form:
        return Form(self._shapes, lambda a, b: self._terms(a, b, part), self.layer.queries, title)

    def __repr__(self) -> str:
        of = self.layer
        what = "cross-attention" if of.crossed else "self-attention"
        return (
            f"AttentionHessian({of.kind} {what}, {of.heads} head{'s' if of.heads > 1 else ''}, {of.samples} sample"
            f"{'s' if of.samples > 1 else ''} of {of.queries.shape[1]} tokens; blocks "
            + ", ".join(f"{name} {a}×{b}" for name, (a, b) in self.total.shapes.items())
            + f"; {self.total.size} × {self.total.size})"
        )

    @cached_property
    def _state(self) -> State:
        # tokens of which the loss knows nothing add nothing
        g, parts = self.loss.gradient, (self.loss.outer, self.loss.rest)
        if all(isinstance(s, Tensor) or s == 0 for s in parts):
            counts = (g != 0).any(-1)
            for s in parts:
                counts = counts | (s != 0).flatten(-2).any(-1) if isinstance(s, Tensor) else counts
            keep = counts.any(0).nonzero()[:, 0]
            if 0 < len(keep) < g.shape[1]:
                reduced = Loss(g[:, keep], *(s[:, keep] if isinstance(s, Tensor) else s for s in parts))
                return State(self.layer.rows(keep), reduced)
        return State(self.layer, self.loss)

    def _terms(self, first: str, second: str, part: Part) -> list[Term]:
        if first in self._slots and second in self._slots:
            return terms(self._state, self._slots[first], self._slots[second], part)
        form = self._form(part)
        (rows, columns), size = form.shapes[second], form.size
        form._room(form.shapes[first][0] * form.shapes[first][1] * rows * columns, f"The block ({first}, {second})")
        unit = torch.zeros(size, rows * columns, dtype=form.dtype, device=form.device)
        unit[form.slices[second]] = torch.eye(rows * columns, dtype=form.dtype, device=form.device)
        block = self.matvec(unit, part)[form.slices[first]]
        return [Given(block.view(*form.shapes[first], rows, columns))]

    def _form(self, part: str) -> Form:
        if part not in PARTS:
            raise CurvlensError(f"part={part!r}; there are 'outer', 'functional' and 'total'.")
        form: Form = getattr(self, part)
        return form

    # What is read off, without building a block

    def norm(self, block: Key | None = None, part: Part = "total") -> float:
        """The Frobenius norm of a block (``"Q"`` or ``("Q", "K")``) or of the whole, exact."""
        return self._form(part).norm(block)

    def trace(self, block: str | None = None, part: Part = "total") -> float:
        """The trace of a diagonal block or of the whole, exact."""
        return self._form(part).trace(block)

    def diagonal(self, block: str | None = None, part: Part = "total") -> Tensor:
        """The diagonal of a diagonal block or of the whole."""
        return self._form(part).diagonal(block)

    def matvec(self, v: Tensor, part: Part = "total") -> Tensor:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        columns = self._form(part).columns(v)
        if self._tokens:
            return self._along_tokens(columns, part).reshape(v.shape)
        if v.ndim == 1:
            return self._by_moments(columns.view(-1), part)
        products = [self._by_moments(column, part) for column in columns.T.contiguous()]
        return torch.stack(products, 1)

    def _by_moments(self, v: Tensor, part: Part) -> Tensor:
        heads = self.layer.heads
        if heads == 1:
            given = {n: p.view(s) for (n, s), p in zip(self._letters.items(), torch.split(v, self._sizes), strict=True)}
            found = by_moments(self._state, given, part)
            return torch.cat([found[letter].reshape(-1) for letter in self._letters])
        parts = torch.split(v.view(heads, -1), self._sizes, 1)
        given = {n: p.reshape(heads, *s) for (n, s), p in zip(self._letters.items(), parts, strict=True)}
        found = by_moments(self._state, given, part)
        return torch.cat([found[letter].reshape(heads, -1) for letter in self._letters], 1).reshape(-1)

    def _along_tokens(self, columns: Tensor, part: Part) -> Tensor:
        of, form = self.layer, self.total
        given: dict[str, Tensor] = {}
        for letter in self._letters:
            names = [name for name, slot in self._slots.items() if slot.letter == letter]
            parts = [columns[form.slices[name]].T.reshape(-1, *form.shapes[name]) for name in names]
            given[letter] = torch.stack(parts, 1)
        for letter in self._tokens:
            source = of.queries if letter == "X" else of.keys
            given[letter] = columns[form.slices[letter]].T.reshape(-1, *source.shape)
        found = along_tokens(of, self.loss, given, part)
        out = torch.empty_like(columns)
        for name, slot in self._slots.items():
            out[form.slices[name]] = found[slot.letter][:, slot.head].flatten(1).T
        for letter in self._tokens:
            out[form.slices[letter]] = found[letter].flatten(1).T
        return out

    @property
    def moments(self) -> Moments:
        """M1, M2 and M3 of every attention row, (heads, batch, L, d, …); M3 has L d³ numbers a head and sample."""
        if self.layer.kind != "softmax":
            raise CurvlensError("Linear attention has no rows that are distributions, hence no moments.")
        of = self.layer
        found = moments(of.attention, of.keys.expand(of.heads, *of.keys.shape))
        lead = (of.heads, *self._batch) if self._named else self._batch
        return Moments(*(m.reshape(*lead, *m.shape[2:]) for m in found))

    # The finer split of the query-key part, Remark D.1

    def _query_key(self, head: int | None) -> tuple[str, str]:
        if self.layer.WK is None:
            raise CurvlensError("One matrix W_QK has no T-functional part: the split needs W_Q and W_K.")
        wanted = [n for n, slot in self._slots.items() if slot.letter in "QK" and slot.head == (head or 0)]
        if len(wanted) != 2:
            raise CurvlensError(f"Head {head} with Q and K is not among the blocks {list(self._slots)}.")
        if head is None and self.layer.heads > 1:
            raise CurvlensError(f"There are {self.layer.heads} heads: say which, as in t_outer(head=0).")
        return (wanted[0], wanted[1])

    def t_outer(self, head: int | None = None) -> Form:
        """The Gauss–Newton part of the (Q, K) Hessian split at the scores T: τ² Vᵀ U V (Remark D.1)."""
        names = self._query_key(head)
        chosen = {name: self._slots[name] for name in names}

        def of(first: str, second: str) -> list[Term]:
            found = terms(self._state, chosen[first], chosen[second], "total")
            return [term for term in found if not isinstance(term, Pair)]  # which is the T-functional part

        return Form({n: s.shape for n, s in chosen.items()}, of, self.layer.queries, "T-outer part")

    def t_functional(self, head: int | None = None) -> Form:
        """What W_Q W_Kᵀ being a product adds: τ [[0, B], [Bᵀ, 0]] ⊗ I (Remark D.1).

        Its eigenvalues are ±τ times the singular values of B, each d_K times.
        """
        names = self._query_key(head)
        chosen = {name: self._slots[name].shape for name in names}

        def of(first: str, second: str) -> list[Term]:
            return [] if first == second else [scores(self._state, self._slots[first].head)]

        return Form(chosen, of, self.layer.queries, "T-functional part")

    def rank_bound(self, head: int | None = None) -> RankBound:
        """Bounds on the rank of the T-outer part."""
        self._query_key(head)
        of = self.layer
        d_q, d_k = of.WQ.shape[1:]
        d = of.keys.shape[-1]
        softmax = of.kind == "softmax"
        # κ is seen through differences of tokens by a softmax, and through W_V alone without one
        keys = of.keys - of.keys.mean(1, keepdim=True) if softmax else of.keys
        r, rho = _rank(of.queries.flatten(0, 1)), _rank(keys.flatten(0, 1))
        a, b = min(d_k, rho), min(d_k, r)
        support = (of.attention[head or 0] != 0).sum(-1) - int(softmax)
        rows = int(support.clamp(min=0, max=d if softmax else min(d, of.d_out)).sum())
        lemma = d_k * d_q + d_k * d - d_k**2 if d_k < min(d, d_q) else d * d_q
        return RankBound(lemma, min(r * a + rho * b - a * b, rows))

    def gauge(self) -> Tensor:
        """Directions in which F does not change, as columns (size, ·): the kernel of the outer and the T-outer part.

        (W_Q Ξ, −W_K Ξᵀ) leaves W_Q W_Kᵀ as it is, and (W_V Ξ, −Ξ W_O) the product of a low-rank value: d_K² and r² a
        head.
        """
        of, form = self.layer, self.total
        columns = []
        for one, other, turned in (("Q", "K", True), ("V", "O", False)):
            for head in range(of.heads):
                pair = {s.letter: n for n, s in self._slots.items() if s.head == head and s.letter in (one, other)}
                if len(pair) < 2:
                    continue
                a = (of.WQ if one == "Q" else of.down)[head]
                second = of.WK if one == "Q" else of.up
                assert second is not None
                b, n = second[head], a.shape[1]
                xi = torch.eye(n * n, dtype=a.dtype, device=a.device).view(n * n, n, n)
                part = torch.zeros(form.size, n * n, dtype=a.dtype, device=a.device)
                part[form.slices[pair[one]]] = (a @ xi).flatten(1).T
                part[form.slices[pair[other]]] = -(b @ xi.mT if turned else xi @ b).flatten(1).T
                columns.append(part)
        if not columns:
            raise CurvlensError("No gauge directions: they need both Q and K, or a low-rank value, among the blocks.")
        return torch.cat(columns, 1)


def _rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix.double()))


def forward(
    X: Tensor,
    WQ: Tensor,
    WK: Tensor,
    WV: Value,
    *,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    context: Tensor | None = None,
) -> Tensor:
    """The output F of the layer, (…, L, d_V), whose loss `hessian` differentiates; arguments as there."""
    of = layer(X, WQ, WK, WV, mask=mask, temperature=temperature, kind=kind, context=context)
    return of.output.reshape(*X.shape[:-2], *of.output.shape[1:])


def hessian(
    X: Tensor,
    WQ: Tensor,
    WK: Tensor,
    WV: Value,
    target: Tensor | None = None,
    *,
    grad: Tensor | None = None,
    curvature: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    context: Tensor | None = None,
    wrt: str = "QKV",
    reduction: str = "mean",
) -> AttentionHessian:
    """The Hessian of a loss behind an attention layer, exact and without differentiation.

    F = A X W_V with A = softmax(X W_Q W_Kᵀ Xᵀ / (t √d_K)), row by row.

    Args:
        X: Tokens (…, L, d). Leading axes are samples; the loss is their mean. WQ: (d, d_K), or (H, d, d_K) for H
        heads, whose outputs add up. WK: Like WQ. WV: (d, d_V), or a pair (down (d, r), up (r, d_V)) for a value of low
        rank; with a leading head axis as WQ. target: Y (…, L, d_V), for the square loss ‖F − Y‖²/(L d_V). grad: For
        any other loss, ∂ℓ/∂F of each sample, (…, L, d_V). curvature: And ∂²ℓ/∂f_i² of each token, (…, L, d_V, d_V), or
        c for c·I; or a pair (gauss_newton, rest) where something
            non-linear follows the layer: the first goes into the outer part, the rest into the functional part.
        mask: None, "causal", or a boolean tensor (L, L_k) or (…, L, L_k), True where a query may attend to a key. A
        query
            that may attend to nothing has output 0.
        temperature: t.
        kind: "softmax", or "linear" for A = X W_Q W_Kᵀ Xᵀ / (t √d_K) itself, zero where masked.
        context: Tokens (…, L_k, d) that give keys and values, for cross-attention.
        wrt: Letters of what to differentiate by: Q, K, V (with W_O, if of low rank), X, and C for the context.
        reduction: "mean" over the samples, or "sum".

    >>> X, W = torch.eye(3, 2), torch.eye(2)
    >>> H = hessian(X, W, W, W, target=torch.zeros(3, 2), mask="causal")
    >>> H.total.names, H.outer["V"].shape, H.norm("V", "functional")
    (('Q', 'K', 'V'), torch.Size([4, 4]), 0.0)
    """
    of = layer(X, WQ, WK, WV, mask=mask, temperature=temperature, kind=kind, context=context)
    batch = X.shape[:-2]
    letters = _letters(wrt, "QKVXC" if context is not None else "QKVX")
    return AttentionHessian(of, loss(of, batch, target, grad, curvature, reduction), letters, batch, named=WQ.ndim == 3)


def hessian_single(
    X: Tensor,
    WQK: Tensor,
    WV: Value,
    target: Tensor | None = None,
    *,
    grad: Tensor | None = None,
    curvature: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    context: Tensor | None = None,
    wrt: str = "QKV",
    reduction: str = "mean",
) -> AttentionHessian:
    """The same with one matrix in the place of W_Q W_Kᵀ: T = X W_QK Xᵀ / t (Lemma 4.1). Blocks are "QK" and "V"."""
    of = layer(X, WQK, None, WV, mask=mask, temperature=temperature, kind=kind, context=context)
    batch = X.shape[:-2]
    letters = _letters(wrt, "QKVXC" if context is not None else "QKVX")
    return AttentionHessian(
        of, loss(of, batch, target, grad, curvature, reduction), letters, batch, named=WQK.ndim == 3
    )


def _letters(wrt: Any, known: str) -> list[str]:
    letters = [letter for letter in dict.fromkeys(wrt) if letter != "O" or "V" in wrt]
    unknown = [letter for letter in letters if letter not in known and letter != "O"]
    if unknown or not letters:
        raise CurvlensError(f"wrt={wrt!r}; it is made of the letters {', '.join(known)} (C only with a context).")
    return letters
