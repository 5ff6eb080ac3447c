"""The dense Hessian while it is being assembled: one matrix, to which blocks of parts of parameters are added."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlens.assembly.graph import View
from curvlens.calculus.form import Form
from curvlens.calculus.terms import Given, on_axes

INPUT = "X"
"""The name of the input of the first layer."""


class Ledger:
    """Blocks of a symmetric matrix by the names of two parameters; those above the diagonal are kept while it grows."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], like: Tensor) -> None:
        self.shapes = dict(shapes)
        self._order = {name: i for i, name in enumerate(self.shapes)}
        self._slices: dict[str, slice] = {}
        size = 0
        for name, (rows, columns) in self.shapes.items():
            self._slices[name] = slice(size, size + rows * columns)
            size += rows * columns
        self._like = like
        self.matrix = torch.empty(size, size, dtype=like.dtype, device=like.device)
        self._empty = {(a, b) for a in self.shapes for b in self.shapes if self._order[a] <= self._order[b]}

    def block(self, first: str, second: str) -> Tensor:
        """The block of two names, the first not behind the second, as a view [a, d, c, e]."""
        part = self.matrix[self._slices[first], self._slices[second]]
        return on_axes(part, (*self.shapes[first], *self.shapes[second]))

    def add(self, first: View, second: View, block: Tensor) -> None:
        """Add the block of two uses of parameters, (size of the first, size of the second), and its transpose."""
        if self._order[first.name] > self._order[second.name]:
            first, second, block = second, first, block.mT
        self._put(first, second, block)
        if first.name == second.name:
            self._put(second, first, block.mT)

    def add_own(self, view: View, block: Tensor) -> None:
        """Add the symmetric block of one use of a parameter with itself."""
        self._put(view, view, block)

    def _put(self, first: View, second: View, block: Tensor) -> None:
        whole = self.block(first.name, second.name)
        target = second.of(first.of(whole), 2)
        key = (first.name, second.name)
        if key in self._empty and target.numel() == whole.numel():
            target.copy_(block.reshape(target.shape))
        else:
            if key in self._empty:
                whole.zero_()
            target.add_(block.reshape(target.shape))
        self._empty.discard(key)

    def form(self, title: str) -> Form:
        """The matrix as a form, its lower half filled in; blocks on the diagonal are symmetric to the last digit."""
        for first, second in self._empty:
            self.block(first, second).zero_()
        self._empty.clear()
        names = list(self.shapes)
        for i, first in enumerate(names):
            here = self._slices[first]
            own = self.matrix[here, here]
            own.copy_((own + own.T).div_(2))
            for second in names[i + 1 :]:
                there = self._slices[second]
                self.matrix[there, here] = self.matrix[here, there].T
        return Assembled(self, title)


class Assembled(Form):
    """A form whose matrix is there."""

    def __init__(self, ledger: Ledger, title: str) -> None:
        super().__init__(ledger.shapes, lambda a, b: [Given(ledger.block(a, b))], ledger._like, title)
        self._matrix = ledger.matrix

    def dense(self) -> Tensor:
        """The whole matrix, blocks in the order of `names`; not a copy."""
        return self._matrix

    def matvec(self, v: Tensor) -> Tensor:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        return self._matrix @ self.checked(v)
