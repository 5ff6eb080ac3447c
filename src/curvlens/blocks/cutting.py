"""Sets of parts: intersections, unions, and vectors that are cut out or embedded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError


def intersection(part: Part, others: Iterable[Part]) -> list[Part]:
    """The intersection of a part with others. Each of them must lie in the part, contain it, or be disjoint from it."""
    common = []
    for other in others:
        if other.parameter != part.parameter:
            continue
        if other.whole or other.key == part.key:
            return [part]
        inside = overlap(part, other)
        if inside == part.size:
            return [part]
        if inside == other.size:
            common.append(other)
        elif inside:
            raise CurvlensError(
                f"{part.key} and {other.key} overlap in {inside} numbers, but neither contains the other. Choose parts "
                "that are disjoint or nested."
            )
    return common


def overlap(part: Part, other: Part) -> int:
    """The number of entries that two parts of one parameter share."""
    if part.whole or other.whole:
        return min(part.size, other.size)
    if part.view == other.view:
        return prod(max(min(a[1], b[1]) - max(a[0], b[0]), 0) for a, b in zip(part.box, other.box, strict=True))
    mark = part.spread(torch.ones(part.size, dtype=torch.int8))
    return int(other.take(mark).sum())


def union(parts: Iterable[Part]) -> list[Part]:
    """The parts that do not lie in another one, in storage order of the parameter."""
    kept: list[Part] = []
    for part in sorted({part.key: part for part in parts}.values(), key=lambda part: -part.size):
        if not any(_holds(other, part) for other in kept):
            kept.append(part)
    return sorted(kept, key=lambda part: 0 if part.whole else _first(part))


def _holds(outer: Part, inner: Part) -> bool:
    if outer.parameter != inner.parameter:
        return False
    common = overlap(inner, outer)
    if common and common != inner.size:
        raise CurvlensError(
            f"{outer.key} and {inner.key} overlap in {common} numbers, but neither contains the other. Choose parts "
            "that are disjoint or nested."
        )
    return common == inner.size


def _first(part: Part) -> int:
    """The index of the first entry of a part in its flat parameter."""
    position, stride = 0, 1
    for (low, _), size in zip(reversed(part.box), reversed(part.view), strict=True):
        position += stride * low
        stride *= size
    return position


class Pieces:
    """Access by part to vectors (numbers, …) over several parts."""

    def __init__(self, parts: Sequence[Part], vectors: Tensor) -> None:
        sizes = [part.size for part in parts]
        self._own = dict(zip((part.key for part in parts), torch.split(vectors, sizes), strict=True))
        self._of: dict[str, list[Part]] = {}
        for part in parts:
            self._of.setdefault(part.parameter, []).append(part)

    def __getitem__(self, part: Part) -> Tensor:
        """The entries of a part that lies in these parts; a view where possible."""
        if part.key in self._own:
            return self._own[part.key]
        spread = [other.spread(self._own[other.key]) for other in self._of[part.parameter]]
        flat = spread[0] if len(spread) == 1 else torch.stack(spread).sum(0)
        return part.take(flat).reshape(part.size, *flat.shape[1:])


def extract(outer: Sequence[Part], inner: Sequence[Part], vectors: Tensor) -> Tensor:
    """Cut the entries of ``inner`` out of vectors (numbers, …) over ``outer``, which contains it."""
    pieces = Pieces(outer, vectors)
    return torch.cat([pieces[part] for part in inner]) if inner else vectors[:0]


def embed(outer: Sequence[Part], inner: Sequence[Part], vectors: Tensor) -> Tensor:
    """Extend vectors over ``inner`` by zeros to vectors over ``outer``."""
    given = torch.split(vectors, [part.size for part in inner])
    result = vectors.new_zeros(sum(part.size for part in outer), *vectors.shape[1:])
    own = dict(zip((part.key for part in outer), torch.split(result, [part.size for part in outer]), strict=True))
    for part, values in zip(inner, given, strict=True):
        if part.key in own:
            own[part.key].copy_(values)
            continue
        flat = part.spread(values)
        for other in outer:
            if other.parameter == part.parameter:
                own[other.key].add_(other.take(flat).reshape(other.size, *vectors.shape[1:]))
    return result
