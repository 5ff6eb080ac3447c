"""The terms that the blocks of a closed-form Hessian consist of. Norms and products do not build the block.

The block of two weight matrices has four axes, [a, d, c, e]: entry (a, d) of the first matrix, entry (c, e) of the
second. Every block of `curvlens.calculus` is a sum of terms of three kinds:

    Tokens:    Σ_n u_n[·] w_n[·] P_n[· ·]      a vector on one axis, a vector on another, a matrix on the other two
    Diagonal:  Σ_n u_n[·] w_n[·] v_n[i] δ_ij   the same with a diagonal matrix
    Pair:      M[· ·] N[· ·]                   two matrices; N may be the identity δ

Letters tell the axis of each operand: ``Tokens(x, q, P, "a", "e", "dc")`` is Σ_n x_n[a] q_n[e] P_n[d, c]. A dense block
is one matrix product of inner size N. Norms, diagonals and products with vectors need much less. Terms are never
changed. This is not enforced: for small terms a check would take as long as the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.room import require_room

AXES = "adce"
TRANSPOSED = str.maketrans("adce", "cead")
CHUNK = 1 << 20
"""Numbers in a chunk of matrices that are built, read once and overwritten: 8 MB in float64."""


@dataclass(frozen=True)
class Factored:
    """Matrices P_n = L_n R_nᵀ given by their factors, (N, ·, r) each. All P_n would be the largest tensor in memory."""

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of P."""
        return (self.left.shape[0], self.left.shape[1], self.right.shape[1])

    def dense(self) -> Float[Tensor, "n p q"]:
        """P."""
        require_room(
            math.prod(self.shape), self.left, "A matrix for every token", "Give fewer tokens or samples at a time."
        )
        return self.left @ self.right.mT

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """All P_n, some at a time, in a buffer that is reused."""
        count, height, width = self.shape
        step = max(1, min(count, CHUNK // (height * width)))
        space = torch.empty(step, height, width, dtype=self.left.dtype, device=self.left.device)
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            yield some, torch.bmm(self.left[some], self.right[some].mT, out=space[: some.stop - start])

    def sizes(self) -> Float[Tensor, " n"]:
        """‖P_n‖, (N,), in float64: squares of the factors would overflow a lower dtype."""
        left, right = self.left.double(), self.right.double()
        squares = ((left.mT @ left) * (right.mT @ right)).flatten(1).sum(1)
        return squares.clamp_(min=0).sqrt()


def factored(left: Float[Tensor, "n p r"], right: Float[Tensor, "n q r"]) -> Float[Tensor, "n p q"] | Factored:
    """L_n R_nᵀ, as factors if those are smaller."""
    factors = Factored(left, right)
    return factors if 2 * left.shape[-1] <= min(factors.shape[1:]) else factors.dense()


def built(given: Tensor | Factored) -> Float[Tensor, "n p q"]:
    """P as a tensor."""
    return given if isinstance(given, Tensor) else given.dense()


def added(first: Tensor | Factored, second: Tensor | Factored) -> Tensor | Factored:
    """P + P', as concatenated factors if those are smaller."""
    if isinstance(first, Factored) and isinstance(second, Factored):
        return factored(torch.cat([first.left, second.left], -1), torch.cat([first.right, second.right], -1))
    return built(first) + built(second)


class _Layout(NamedTuple):
    """The arrangement of a product such that e, the fastest axis of a block, comes last and is copied contiguously."""

    exchanged: bool
    """Whether u and w are exchanged."""
    last: bool
    """Whether they come after the matrix."""
    product: tuple[int, int]
    block: tuple[int, ...]
    """The shape [a, d, c, e], and the positions of its axes in the product."""
    strides: tuple[int, ...]


@lru_cache(1 << 12)
def _layout(axes: tuple[str, str, str], vectors: tuple[int, int], matrix: tuple[int, int]) -> _Layout:
    """The layout for u, w and a matrix of these sizes on these axes."""
    (on_u, on_w, on_matrix), (of_u, of_w) = axes, vectors
    exchanged = on_u == "e"
    both, sizes = (on_w + on_u, (of_w, of_u)) if exchanged else (on_u + on_w, (of_u, of_w))
    last = both[1] == "e"
    have, found = (on_matrix + both, (*matrix, *sizes)) if last else (both + on_matrix, (*sizes, *matrix))
    order = [have.index(axis) for axis in AXES]
    rows, columns = found[0] * found[1], found[2] * found[3]
    strides = (found[1] * columns, columns, found[3], 1)
    block, places = (tuple(each[i] for i in order) for each in (found, strides))
    return _Layout(exchanged, last, (rows, columns), block, places)


@dataclass(eq=False)
class Tokens:
    """Σ_n u_n w_n P_n, with u (N, ·), w (N, ·), P (N, ·, ·)."""

    u: Tensor
    w: Tensor
    given: Tensor | Factored
    """P, or its factors."""
    on_u: str
    on_w: str
    on_matrix: str
    symmetric: bool = False
    """Whether every P_n is known to be symmetric, as in a diagonal block."""

    @property
    def matrix(self) -> Tensor:
        """P."""
        return self.given if isinstance(self.given, Tensor) else self._built

    @cached_property
    def _built(self) -> Tensor:
        return built(self.given)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """All P_n, some at a time, in a buffer that is overwritten."""
        if isinstance(self.given, Tensor):
            yield slice(None), self.given
        else:
            yield from self.given.chunks()

    @property
    def T(self) -> Tokens:
        """The term of the transposed block."""
        return replace(
            self,
            on_u=self.on_u.translate(TRANSPOSED),
            on_w=self.on_w.translate(TRANSPOSED),
            on_matrix=self.on_matrix.translate(TRANSPOSED),
        )

    @property
    def axes(self) -> tuple[str, str, str]:
        """The axes of the operands."""
        return (self.on_u, self.on_w, self.on_matrix)

    def dense(self, space: Float[Tensor, " s"] | None = None) -> Float[Tensor, "a d c e"]:
        """[a, d, c, e], a view of one matrix product; written into ``space`` if that is given."""
        u, w, matrix, on_matrix = self.u, self.w, self.matrix, self.on_matrix
        if matrix.stride(1) == 1 and "e" not in on_matrix:  # a transpose that need not be copied
            matrix, on_matrix = matrix.mT, on_matrix[::-1]
        layout = _layout((self.on_u, self.on_w, on_matrix), (u.shape[1], w.shape[1]), matrix.shape[1:])
        if space is None:
            space = matrix.new_empty(layout.product)
        product, block = space.as_strided(layout.product, (layout.product[1], 1)), space.as_strided(*layout[3:])
        outer = (w.unsqueeze(2) * u.unsqueeze(1) if layout.exchanged else u.unsqueeze(2) * w.unsqueeze(1)).flatten(1)
        rows, columns = (matrix.flatten(1), outer) if layout.last else (outer, matrix.flatten(1))
        torch.mm(rows.T, columns, out=product)
        return block

    def diagonal(self) -> Float[Tensor, "a d"]:
        """[a, d], the entries with c = a and e = d."""
        same = {"c": "a", "e": "d", "a": "a", "d": "d"}
        on_u, on_w, on_matrix = ("".join(same[axis] for axis in axes) for axes in self.axes)
        return torch.einsum(f"n{on_u},n{on_w},n{on_matrix}->ad", self.u, self.w, self.matrix)

    def times(self, v: Float[Tensor, "c e k"]) -> Float[Tensor, "a d k"]:
        """[a, d, k], the product with k matrices v [c, e, k]."""
        (first, on_first), (last, on_last) = sorted(
            [(self.u, self.on_u), (self.w, self.on_w)], key=lambda pair: pair[1] in "ad"
        )
        seen = torch.einsum(f"n{on_first},cek->n{'e' if on_first == 'c' else 'c'}k", first, v)
        left = self.on_matrix.replace("c", "").replace("e", "")
        kept = torch.einsum(f"n{self.on_matrix},n{'e' if on_first == 'c' else 'c'}k->n{left}k", self.matrix, seen)
        return torch.einsum(f"n{on_last},n{left}k->adk", last, kept)

    def rows(self, part: slice) -> Tokens:
        """The term restricted to some rows a."""
        if self.on_u == "a":
            return replace(self, u=self.u[:, part])
        if self.on_w == "a":
            return replace(self, w=self.w[:, part])
        if self.on_matrix[0] == "a":
            return replace(self, given=self.matrix[:, part], symmetric=False)
        return replace(self, given=self.matrix[:, :, part], symmetric=False)


@dataclass(eq=False)
class Pair:
    """M ⊗ N on chosen axes; N = None is the identity of size ``size``."""

    first: Tensor
    second: Tensor | None
    on_first: str
    on_second: str
    size: int = 0

    @property
    def T(self) -> Pair:
        """The term of the transposed block."""
        return replace(
            self, on_first=self.on_first.translate(TRANSPOSED), on_second=self.on_second.translate(TRANSPOSED)
        )

    @property
    def matrix(self) -> Tensor:
        """N, also as the identity."""
        if self.second is not None:
            return self.second
        return torch.eye(self.size, dtype=self.first.dtype, device=self.first.device)

    def dense(self) -> Float[Tensor, "a d c e"]:
        """[a, d, c, e]."""
        return torch.einsum(f"{self.on_first},{self.on_second}->{AXES}", self.first, self.matrix)

    def add_to(self, out: Float[Tensor, "a d c e"]) -> None:
        """Add the term to a block [a, d, c, e]. For an identity only its diagonal changes."""
        if self.second is not None:
            out += self.dense()
            return
        one, other = (AXES.index(axis) for axis in self.on_second)
        diagonal = out.diagonal(dim1=one, dim2=other)  # the other two axes in order, then the diagonal
        left = [axis for axis in AXES if axis in self.on_first]
        diagonal += (self.first if "".join(left) == self.on_first else self.first.T)[..., None]

    def diagonal(self) -> Float[Tensor, "a d"]:
        """[a, d], the entries with c = a and e = d."""
        same = {"c": "a", "e": "d", "a": "a", "d": "d"}
        on_first, on_second = ("".join(same[axis] for axis in axes) for axes in (self.on_first, self.on_second))
        return torch.einsum(f"{on_first},{on_second}->ad", self.first, self.matrix)

    def times(self, v: Float[Tensor, "c e k"]) -> Float[Tensor, "a d k"]:
        """[a, d, k], the product with k matrices v [c, e, k]."""
        return torch.einsum(f"{self.on_first},{self.on_second},cek->adk", self.first, self.matrix, v)

    def rows(self, part: slice) -> Pair:
        """The term restricted to some rows a."""
        if "a" in self.on_first:
            return replace(self, first=self.first[part] if self.on_first[0] == "a" else self.first[:, part])
        matrix = self.matrix
        return replace(self, second=matrix[part] if self.on_second[0] == "a" else matrix[:, part])


@dataclass(eq=False)
class Diagonal:
    """Σ_n u_n w_n diag(v_n), with u, w and v (N, ·)."""

    u: Tensor
    w: Tensor
    v: Tensor
    on_u: str
    on_w: str
    on_pair: str

    @property
    def T(self) -> Diagonal:
        """The term of the transposed block."""
        return replace(
            self,
            on_u=self.on_u.translate(TRANSPOSED),
            on_w=self.on_w.translate(TRANSPOSED),
            on_pair=self.on_pair.translate(TRANSPOSED),
        )

    @property
    def axes(self) -> tuple[str, str, str]:
        """The axes of the operands. Exchanging the two axes of a diagonal changes nothing."""
        return (self.on_u, self.on_w, "".join(sorted(self.on_pair)))

    def dense(self) -> Float[Tensor, "a d c e"]:
        """[a, d, c, e]."""
        size = {self.on_u: self.u.shape[1], self.on_w: self.w.shape[1], **dict.fromkeys(self.on_pair, self.v.shape[1])}
        out = self.v.new_zeros([size[axis] for axis in AXES])
        self.add_to(out)
        return out

    def add_to(self, out: Float[Tensor, "a d c e"]) -> None:
        """Add the term to a block [a, d, c, e]. Only its diagonal changes."""
        one, other = (AXES.index(axis) for axis in self.on_pair)
        left = "".join(axis for axis in AXES if axis not in self.on_pair)
        core = torch.einsum(f"n{self.on_u},n{self.on_w},ni->{left}i", self.u, self.w, self.v)
        diagonal = out.diagonal(dim1=one, dim2=other)
        diagonal += core

    def diagonal(self) -> Float[Tensor, "a d"]:
        """[a, d], the entries with c = a and e = d, for a term of a diagonal block."""
        vector, index = ("d", "a") if "a" in self.on_pair else ("a", "d")
        return torch.einsum(f"n{vector},n{vector},n{index}->ad", self.u, self.w, self.v)

    def times(self, v: Float[Tensor, "c e k"]) -> Float[Tensor, "a d k"]:
        """[a, d, k], the product with k matrices v [c, e, k]. One vector is on the rows, one on the columns."""
        (first, on_first), (last, on_last) = sorted(
            [(self.u, self.on_u), (self.w, self.on_w)], key=lambda pair: pair[1] in "ad"
        )
        column, row = "e" if on_first == "c" else "c", "d" if on_last == "a" else "a"
        seen = torch.einsum(f"n{on_first},cek->n{column}k", first, v) * self.v[..., None]
        return torch.einsum(f"n{on_last},n{row}k->adk", last, seen)

    def rows(self, part: slice) -> Diagonal | Given:
        """The term restricted to some rows a."""
        if self.on_u == "a":
            return replace(self, u=self.u[:, part])
        if self.on_w == "a":
            return replace(self, w=self.w[:, part])
        return Given(self.dense()[part])


@dataclass(eq=False)
class Given:
    """A block given as a tensor, [a, d, c, e]."""

    block: Tensor

    @property
    def T(self) -> Given:
        """The term of the transposed block."""
        return Given(self.block.permute(2, 3, 0, 1))

    def dense(self) -> Float[Tensor, "a d c e"]:
        """[a, d, c, e]."""
        return self.block

    def add_to(self, out: Float[Tensor, "a d c e"]) -> None:
        """Add the term to a block [a, d, c, e]."""
        out += self.block

    def diagonal(self) -> Float[Tensor, "a d"]:
        """[a, d], the entries with c = a and e = d."""
        return torch.einsum("adad->ad", self.block)

    def times(self, v: Float[Tensor, "c e k"]) -> Float[Tensor, "a d k"]:
        """[a, d, k], the product with k matrices v [c, e, k]."""
        return torch.einsum("adce,cek->adk", self.block, v)

    def rows(self, part: slice) -> Given:
        """The term restricted to some rows a."""
        return Given(self.block[part])


Term = Tokens | Diagonal | Pair | Given


def merged(terms: Sequence[Term]) -> list[Term]:
    """The same sum with fewer terms: the matrices of terms with equal vectors on equal axes are added."""
    if len(terms) == 1:
        return list(terms)
    result: list[Term] = []
    for term in terms:
        for i, other in enumerate(result):
            if (
                isinstance(term, Tokens)
                and isinstance(other, Tokens)
                and term.axes == other.axes
                and term.u is other.u
                and term.w is other.w
            ):
                symmetric = other.symmetric and term.symmetric
                result[i] = Tokens(other.u, other.w, added(other.given, term.given), *other.axes, symmetric)
                break
        else:
            result.append(term)
    return result


def summed(terms: Sequence[Term], outs: Sequence[Tensor], work: Tensor, more: Tensor | None = None) -> None:
    """Write the sum of the terms into blocks [a, d, c, e]: views of a larger matrix, the second its mirror.

    The mirror is copied from ``work``, where the sum is contiguous; in the larger matrix it is not.

    ``work`` and, with several `Tokens`, ``more`` are flat buffers of as many numbers: allocating new memory costs more
    than filling it.
    """
    total: Tensor | None = None
    for term in terms:
        if isinstance(term, Tokens):
            total = term.dense(work) if total is None else total.add_(term.dense(more))
    targets = [out.zero_() for out in outs] if total is None else [total]
    for term in terms:
        if not isinstance(term, Tokens):
            for target in targets:
                term.add_to(target)
    if total is not None:
        for out in outs:
            out.copy_(total)
