"""A part of a parameter: the whole, or a regular region such as the queries of one head in a fused tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import Tensor

Range = None | int | tuple[int, int]
"""The indices along an axis: all (None), one, or a range (start, stop)."""


@dataclass(frozen=True)
class Part:
    """``parameter.view(view)[index]``; without an index the whole parameter.

    >>> Part("w", (4, 6), view=(4, 3, 2), index=(None, 1)).key
    'w.view(4, 3, 2)[:, 1]'
    """

    parameter: str
    full: tuple[int, ...]
    """The shape of the parameter."""
    view: tuple[int, ...] = ()
    index: tuple[Range, ...] = ()
    order: tuple[int, ...] | None = field(default=None, compare=False)
    """The order of the axes with inputs first, as in X W. None keeps the storage order."""

    @cached_property
    def whole(self) -> bool:
        """Whether this is the parameter itself."""
        return all(item is None for item in self.index)

    @cached_property
    def key(self) -> str:
        """The name of this part: the expression that cuts it out."""
        if self.whole:
            return self.parameter
        text = [":" if i is None else str(i) if isinstance(i, int) else f"{i[0]}:{i[1]}" for i in self.index]
        return f"{self.parameter}.view({', '.join(map(str, self.view))})[{', '.join(text)}]"

    @cached_property
    def box(self) -> tuple[tuple[int, int], ...]:
        """The range (start, stop) along each axis of the view."""
        index = (*self.index, *(None,) * (len(self.view) - len(self.index)))
        return tuple(
            (0, n) if i is None else (i, i + 1) if isinstance(i, int) else i
            for i, n in zip(index, self.view, strict=True)
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this part."""
        if self.whole:
            return self.full
        kept = [not isinstance(i, int) for i in self.index] + [True] * (len(self.view) - len(self.index))
        return tuple(high - low for (low, high), keep in zip(self.box, kept, strict=True) if keep)

    @cached_property
    def size(self) -> int:
        """The number of entries."""
        return prod(self.shape)

    def take(self, flat: Tensor) -> Tensor:
        """This part of a flat parameter, or of each column of a matrix; a view."""
        extra = flat.shape[1:]
        if self.whole:
            return flat.view(*self.full, *extra)
        index = tuple(slice(None) if i is None else i if isinstance(i, int) else slice(*i) for i in self.index)
        return flat.view(*self.view, *extra)[index]

    def spread(self, values: Tensor) -> Tensor:
        """A flat parameter with ``values`` in this part and zeros elsewhere; ``values`` is flat, or has columns."""
        if self.whole:
            return values
        flat = values.new_zeros(prod(self.full), *values.shape[1:])
        self.take(flat).copy_(values.view(*self.shape, *values.shape[1:]))
        return flat

    def to_math(self, values: Tensor) -> Tensor:
        """From storage order to the order of X W: inputs first, then outputs, row by row."""
        return _permuted(values, self._viewed(), self._axes())

    def from_math(self, values: Tensor) -> Tensor:
        """Back to storage order."""
        axes = self._axes()
        back = tuple(axes.index(i) for i in range(len(axes)))
        return _permuted(values, tuple(self._viewed()[i] for i in axes), back)

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(len(self._viewed()))) if self.order is None else self.order

    def _viewed(self) -> tuple[int, ...]:
        """The shape whose axes `order` refers to: that of the view, also for a whole parameter."""
        return self.view if self.whole and self.view else self.shape

    def in_math(self) -> tuple[int, ...]:
        """The shape in the order of X W."""
        viewed = self._viewed()
        return tuple(viewed[i] for i in self._axes())


def _permuted(values: Tensor, shape: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    """Permute the axes of flat values of shape ``shape``, with or without columns."""
    extra = values.shape[1:]
    tail = tuple(range(len(shape), len(shape) + len(extra)))
    return values.reshape(*shape, *extra).permute(*axes, *tail).reshape(values.shape)


_KEY = re.compile(r"(?P<name>.*)\.view\((?P<view>[\d, ]+)\)\[(?P<index>[\d:, ]+)\]", re.DOTALL)


def parse(key: str, shape: tuple[int, ...]) -> Part:
    """The part with this key; ``shape`` is the shape of the parameter, or of the part itself if it is not whole.

    >>> parse("w.view(4, 3, 2)[:, 1]", (4, 2)).shape
    (4, 2)
    """
    found = _KEY.fullmatch(key)
    if found is None:
        return Part(key, shape)
    view = tuple(int(n) for n in found["view"].split(","))
    index: list[Range] = []
    for item in found["index"].split(","):
        low, colon, high = item.strip().partition(":")
        index.append(None if not low else (int(low), int(high)) if colon else int(low))
    return Part(found["name"], (prod(view),), view, tuple(index))
