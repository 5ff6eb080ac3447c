"""The dense Hessian during its assembly, and the resulting form.

While states are eliminated, every use of a parameter is a separate variable. Uses are stored in the order of the
network and added from the last to the first. So the row of a use contains its blocks with itself and with all uses
added before it. In the end uses become parameters: a use is a part of a parameter, perhaps transposed, and several uses
of one parameter add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.assembly.circuit import View
from curvlens.calculus.form import Form, MatrixForm

INPUT = "X"
"""The name of the input of the first layer."""


PANEL = 256
"""How many rows are copied to columns at a time."""


class Use(NamedTuple):
    """One use of a parameter by a primitive, and its position among all uses."""

    view: View
    start: int
    stop: int

    @property
    def place(self) -> slice:
        """The slice of its rows and columns."""
        return slice(self.start, self.stop)


class Ledger:
    """A symmetric matrix over the uses of parameters; the part right of the diagonal grows."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], width: int, like: Tensor) -> None:
        """``shapes`` of the requested parameters, ``width`` of all their uses together."""
        self.shapes = dict(shapes)
        self.width, self.start = width, width
        self._uses: list[Use] = []
        self._like = like
        self._unwritten: set[tuple[int, int]] = set()
        """Blocks of uses of one primitive, by first row and column, to which nothing was added yet."""
        self._matrix = torch.empty(width, width, dtype=like.dtype, device=like.device)

    def open(self, views: Sequence[View], *, alone: bool) -> list[Use]:
        """Reserve space for the uses of one primitive, before the existing ones; ``alone`` if no `set_row` follows."""
        first = self.start - sum(self.size(view) for view in views)
        uses, start = [], first
        for view in views:
            uses.append(Use(view, start, start + self.size(view)))
            start = uses[-1].stop
        if alone:
            self._matrix[first : self.start, self.start :].zero_()
        self._unwritten.update((a.place.start, b.place.start) for i, a in enumerate(uses) for b in uses[i:])
        self.start = first
        self._uses = [*uses, *self._uses]
        return uses

    def size(self, view: View) -> int:
        """The number of entries of a use."""
        return view.of(torch.empty(self.shapes[view.name], device="meta")).numel()

    def set_row(self, use: Use, block: Tensor) -> None:
        """Set the blocks of a use with all uses added before its primitive."""
        self._matrix[use.place, self.width - block.shape[1] :] = block

    def add(self, first: Use, second: Use, block: Tensor) -> None:
        """Add to the block of two uses of one primitive, or of one with itself."""
        if first.start > second.start:
            first, second, block = second, first, block.T
        place = self._matrix[first.place, second.place]
        if (first.start, second.start) in self._unwritten:
            self._unwritten.remove((first.start, second.start))
            place.copy_(block)
        else:
            place += block

    def form(self, title: str) -> Form:
        """The matrix by parameters, exactly symmetric."""
        stops = {use.start: use.stop for use in self._uses}
        for row, column in self._unwritten:
            self._matrix[row : stops[row], column : stops[column]].zero_()
        for use in self._uses:
            for start in range(use.start, use.stop, PANEL):  # copy the upper part to the lower, panel by panel
                stop = min(start + PANEL, use.stop)
                own = self._matrix[start:stop, start:stop]
                own.copy_((own + own.T).div_(2))
                self._matrix[stop:, start:stop] = self._matrix[start:stop, stop:].T
        names = [use.view.name for use in self._uses]
        if names != list(self.shapes) or any(use.view != View(use.view.name) for use in self._uses):
            self._matrix = self._by_parameters(self._by_parameters(self._matrix).T)
        if len(set(names)) < len(names):  # rows are summed before columns, so the last digits may differ
            self._matrix = (self._matrix + self._matrix.T).div_(2)
        return Assembled(self.shapes, self._matrix, title)

    def _by_parameters(self, matrix: Tensor) -> Tensor:
        """Rows of uses (width, k) as rows of parameters (size, k)."""
        rows = matrix.new_zeros(sum(r * c for r, c in self.shapes.values()), matrix.shape[1])
        start, places = 0, {}
        for name, (r, c) in self.shapes.items():
            places[name] = rows[start : start + r * c].view(r, c, -1)
            start += r * c
        for use in self._uses:
            target = use.view.of(places[use.view.name])
            target += matrix[use.place].view(target.shape)
        return rows


class Assembled(MatrixForm):
    """A form that returns its own matrix: a copy may not fit into memory."""

    def dense(self) -> Tensor:
        """The whole matrix, blocks in the order of `names`; not a copy."""
        return self._matrix
