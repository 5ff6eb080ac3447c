"""A symmetric matrix in named blocks, each a sum of terms. The closed-form Hessians have this form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.room import require_room
from curvlens.calculus.term_norms import norm
from curvlens.calculus.terms import Given, Term, merged, summed
from curvlens.errors import CurvlensError, a_kind, listing, nearest

Key = str | tuple[str, str]
SplitPart = Literal["outer", "functional", "total"]
PARTS: tuple[SplitPart, ...] = ("outer", "functional", "total")


def not_a_part(key: object, parts: Sequence[str]) -> NoReturn:
    """Raise an error: blocks belong to a part of a Hessian, not to the Hessian."""
    inside = ", ".join(map(repr, key)) if isinstance(key, tuple) else repr(key)
    *more, last = (f"H.{part}[{inside}]" for part in parts)
    raise CurvlensError(f"A block belongs to a part of the Hessian: {', '.join(more)} or {last}.")


def places(shapes: Mapping[str, tuple[int, int]]) -> dict[str, slice]:
    """The slices of matrices of these shapes in the vector of all of them."""
    found, start = {}, 0
    for name, (rows, columns) in shapes.items():
        found[name] = slice(start, start + rows * columns)
        start += rows * columns
    return found


def require_room_for(numbers: int, like: Tensor, what: str) -> None:
    """Raise an error if this many numbers do not fit into memory."""
    require_room(numbers, like, what, "Without building it: `matvec`, `norm`, `trace` and `diagonal`.")


class Form:
    """Blocks by name: ``form["Q", "K"]`` is the 2-D block on row-vecs, ``form["Q"]`` is ``form["Q", "Q"]``.

    Norms, traces, diagonals and products do not build the block.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        terms: Callable[[str, str], Sequence[Term]],
        like: Tensor,
        title: str,
    ) -> None:
        """``terms(a, b)`` returns the terms of the block (a, b); it is called only if a equals b or comes before it.

        It must not refer back to the owner of the form: a reference cycle stays in memory until the garbage collector
        runs.
        """
        self.shapes = dict(shapes)
        self.dtype, self.device, self._like = like.dtype, like.device, like
        self.title = title
        self._terms = terms
        self._cache: dict[tuple[str, str], list[Term]] = {}
        self._norms: dict[tuple[str, str], float] = {}
        self._order = {name: i for i, name in enumerate(self.shapes)}
        self.slices = places(self.shapes)
        self.size = sum(rows * columns for rows, columns in self.shapes.values())

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} {rows}×{columns}" for name, (rows, columns) in self.shapes.items())
        return f"{self.title} ({self.size} × {self.size}; {blocks})"

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks, in the order of `dense`."""
        return tuple(self.shapes)

    @property
    def shape(self) -> tuple[int, int]:
        """(size, size)."""
        return (self.size, self.size)

    @in_own_dtype
    def terms(self, first: str, second: str) -> list[Term]:
        """The terms of a block. Below the diagonal they are the transposed terms of the mirrored block."""
        if self._order[first] > self._order[second]:
            return [term.T for term in self._above(second, first)]
        return self._above(first, second)

    def _above(self, first: str, second: str) -> list[Term]:
        if (first, second) not in self._cache:
            self._cache[first, second] = list(self._terms(first, second))
        return self._cache[first, second]

    def pair(self, key: Key) -> tuple[str, str]:
        """The two names of a block, checked."""
        names = tuple(key) if isinstance(key, tuple) else (key, key)
        if len(names) != 2:
            raise CurvlensError(f"A block has two names, as in H['Q', 'K']; {len(names)} given: {names!r}.")
        for name in names:
            if not isinstance(name, str) or name not in self.shapes:
                two = isinstance(key, str) and len(key) == 2 and all(letter in self.shapes for letter in key)
                hint = f"Two names are a pair: {tuple(str(key))!r}." if two else nearest(str(name), self.shapes)
                raise CurvlensError(f"There is no block {name!r}. {hint}")
        return names

    def _axes(self, first: str, second: str) -> tuple[int, int, int, int]:
        return (*self.shapes[first], *self.shapes[second])

    # Dense results

    @in_own_dtype
    def __getitem__(self, key: Key) -> Float[Tensor, "p q"]:
        first, second = self.pair(key)
        rows, columns = (self.shapes[n][0] * self.shapes[n][1] for n in (first, second))
        require_room_for(2 * rows * columns, self._like, f"The block ({first}, {second}), with as much to work in,")
        out, work = (torch.empty(rows * columns, dtype=self.dtype, device=self.device) for _ in range(2))
        summed(merged(self.terms(first, second)), [out.view(self._axes(first, second))], work)
        return out.view(rows, columns)

    @in_own_dtype
    def dense(self) -> Float[Tensor, "n n"]:
        """The whole matrix, blocks in the order of `names`."""
        largest = max(rows * columns for rows, columns in self.shapes.values()) ** 2
        what = f"{self.title} as a dense matrix, with two blocks to work in,"
        require_room_for(self.size**2 + 2 * largest, self._like, what)
        out = torch.empty(self.size, self.size, dtype=self.dtype, device=self.device)
        self._write(out, *(torch.empty(largest, dtype=self.dtype, device=self.device) for _ in range(2)))
        return out

    @torch.inference_mode()  # saves a tenth of the time for small layers; results are allocated outside
    def _write(self, out: Tensor, work: Tensor, more: Tensor) -> None:
        pairs = [(first, second) for i, first in enumerate(self.names) for second in self.names[i:]]
        # compute all small tensors before writing: the writes evict everything else from the caches
        blocks = [(self._above(first, second), self._targets(out, first, second)) for first, second in pairs]
        for terms, targets in blocks:
            summed(merged(terms), targets, work, more)

    def _targets(self, out: Tensor, first: str, second: str) -> list[Tensor]:
        """The places [a, d, c, e] of a block in a matrix: one view and, off the diagonal, that of its mirror."""
        (height, width), (tall, wide), n = self.shapes[first], self.shapes[second], self.size
        shape, row, column = (height, width, tall, wide), self.slices[first].start, self.slices[second].start
        found = [out.as_strided(shape, (width * n, n, wide, 1), row * n + column)]
        if first != second:
            found.append(out.as_strided(shape, (width, 1, wide * n, n), column * n + row))
        return found

    # Numbers that do not need the dense matrix

    @in_own_dtype
    def norm(self, key: Key | None = None, *more: object) -> float:
        """The exact Frobenius norm of a block (a name, or one pair of names), or of the whole."""
        if more:
            raise CurvlensError(
                f"norm takes one block, got {(key, *more)!r}: for two names call norm(({key!r}, {more[0]!r})). A Form "
                "is one part already and takes no part."
            )
        if key is not None:
            first, second = self.pair(key)
            if (first, second) not in self._norms:
                self._norms[first, second] = norm(self.terms(first, second), self._axes(first, second))
            return self._norms[first, second]
        names = self.names
        each = {(first, second): self.norm((first, second)) for i, first in enumerate(names) for second in names[i:]}
        return math.hypot(*(value * (1 if a == b else math.sqrt(2)) for (a, b), value in each.items()))

    @in_own_dtype
    def diagonal(self, name: str | None = None) -> Float[Tensor, " n"]:
        """The diagonal of the block (name, name), or of the whole."""
        if name is None:
            return torch.cat([self.diagonal(name) for name in self.names])
        first, second = self.pair(name)
        if first != second:
            raise CurvlensError(f"The block {name!r} is off the diagonal: diagonal and trace are of one name, as 'Q'.")
        out = torch.zeros(self.shapes[first], dtype=self.dtype, device=self.device)
        for term in self.terms(first, first):
            out += term.diagonal()
        return out.reshape(-1)

    def trace(self, name: str | None = None) -> float:
        """The exact trace of the block (name, name), or of the whole."""
        return float(self.diagonal(name).double().sum())

    @in_own_dtype
    def matvec(self, v: Tensor) -> Float[Tensor, "n ..."]:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        columns = self.columns(v)
        out = torch.zeros_like(columns)
        for first in self.names:
            for second in self.names:
                part = columns[self.slices[second]].view(*self.shapes[second], -1)
                for term in self.terms(first, second):
                    out[self.slices[first]] += term.times(part).flatten(0, 1)
        return out.reshape(v.shape)

    def columns(self, v: Tensor) -> Float[Tensor, "n k"]:
        """A vector or matrix of the right length, as (size, k) in the dtype of the form."""
        return self.checked(v).reshape(self.size, -1)

    def checked(self, v: Tensor) -> Float[Tensor, "n ..."]:
        """A vector or matrix of the right length, in the dtype of the form."""
        if not isinstance(v, Tensor) or v.ndim not in (1, 2) or v.shape[0] != self.size or v.is_complex():
            given = f"shape {tuple(v.shape)}, {v.dtype}" if isinstance(v, Tensor) else a_kind(v)
            raise CurvlensError(
                f"{self.title} takes a vector of {self.size} numbers (blocks {listing(self.names)}) or a "
                f"({self.size}, k) matrix, got {given}."
            )
        return v.detach().to(self._like)

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.matvec(v)


class MatrixForm(Form):
    """A form with a dense matrix."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], matrix: Tensor, title: str) -> None:
        super().__init__(shapes, partial(_of_matrix, matrix, shapes), matrix, title)
        self._matrix = matrix

    def _above(self, first: str, second: str) -> list[Term]:
        return list(self._terms(first, second))  # not cached: a pickle would contain the whole matrix for every block

    def dense(self) -> Float[Tensor, "n n"]:
        """A copy of the whole matrix, blocks in the order of `names`."""
        return self._matrix.clone()

    @in_own_dtype
    def matvec(self, v: Tensor) -> Float[Tensor, "n ..."]:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        return self._matrix @ self.checked(v)


def _of_matrix(matrix: Tensor, shapes: Mapping[str, tuple[int, int]], first: str, second: str) -> list[Term]:
    at = places(shapes)
    return [Given(matrix[at[first], at[second]].view(*shapes[first], *shapes[second]))]


class Split:
    """H = outer + functional, as three `Form`s: ``outer``, ``functional`` and ``total``.

    ``H.outer["Q", "K"]`` is a block, ``H.total.dense()`` the whole.
    """

    def __getitem__(self, key: object) -> NoReturn:
        not_a_part(key, ("total", "outer", "functional"))

    def _form(self, part: str) -> Form:
        if part in PARTS:
            form: Form = getattr(self, part)
            return form
        names = self._form("total").names
        hint = f" A block is one argument: norm({names[:2]!r})." if part in names and len(names) > 1 else ""
        raise CurvlensError(f"part={part!r}, expected 'outer', 'functional' or 'total'.{hint}")

    def norm(self, block: Key | None = None, part: SplitPart = "total") -> float:
        """The Frobenius norm of a block (a name, or a pair of names) or of the whole, exact.

        It is computed from pairs of tokens, or by building the block some rows at a time, whichever is less work.
        """
        return self._form(part).norm(block)

    def trace(self, block: str | None = None, part: SplitPart = "total") -> float:
        """The trace of a diagonal block or of the whole, exact."""
        return self._form(part).trace(block)

    def diagonal(self, block: str | None = None, part: SplitPart = "total") -> Float[Tensor, " n"]:
        """The diagonal of a diagonal block or of the whole."""
        return self._form(part).diagonal(block)

    def matvec(self, v: Tensor, part: SplitPart = "total") -> Float[Tensor, "n ..."]:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        return self._form(part).matvec(v)

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.matvec(v)
