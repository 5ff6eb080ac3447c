"""The notation for the axes of a parameter in the rules of a family.

A word is one axis of the tensor. Words in brackets share one axis, which is their product: ``in (q/k/v head dim)`` is
the fused weight of GPT-2, ``(head q/k/v dim) in`` the interleaved one of GPT-NeoX, ``out (head dim)`` the output
projection.

- ``in`` and ``out`` are the inputs and outputs of a weight; the order of X W has ``in`` first and ``out`` last.
- ``head`` and ``expert`` divide a block into its heads; ``dim`` is the width of a head.
- ``q/k/v`` are roles of equal size. ``dt+b+c`` are roles whose sizes the family gives; ``q:head+k:head+v:head`` are
  such roles with heads.
- any other word is an axis without a meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from curvlens.blocks.parts import Part, Range


class DoesNotFitError(Exception):
    """The shape of a parameter does not fit the axes of a rule."""


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that belongs to a block, and its parts by head."""

    role: str
    """Empty if the parameter has only one role."""
    part: Part
    heads: Mapping[int, Part]


_Make = Callable[[Mapping[int, Range]], Part]
"""Maps fixed indices of some axes to a part."""


@dataclass(frozen=True)
class _Axis:
    word: str
    size: int


def cuts(parameter: str, shape: tuple[int, ...], axes: str, sizes: Mapping[str, int]) -> list[Cut]:
    """The parts of a parameter by role. ``sizes`` has ``dim``, and the sizes of unequal roles.

    >>> [cut.part.key for cut in cuts("w", (4, 6), "in (q/k/v dim)", {"dim": 2})]
    ['w.view(4, 3, 2)[:, 0]', 'w.view(4, 3, 2)[:, 1]', 'w.view(4, 3, 2)[:, 2]']
    """
    words = _words(axes)
    if len(words) != len(shape):
        raise DoesNotFitError
    flat = [axis for word, n in zip(words, shape, strict=True) for axis in _factors(word, n, sizes)]
    view = tuple(axis.size for axis in flat)

    def part(chosen: Mapping[int, Range]) -> Part:
        index = [chosen.get(i) for i in range(len(flat))]
        left = [axis.word for axis, item in zip(flat, index, strict=True) if not isinstance(item, int)]
        order = tuple(sorted(range(len(left)), key=lambda i: _RANK.get(left[i], 2)))
        while index and index[-1] is None:
            index.pop()
        return Part(parameter, shape, view, tuple(index), order)

    head = next((i for i, axis in enumerate(flat) if axis.word in ("head", "expert")), None)
    for i, axis in enumerate(flat):
        if "/" in axis.word:
            return [
                Cut(role, part({i: j}), _by_head(part, head, flat, {i: j}))
                for j, role in enumerate(axis.word.split("/"))
            ]
        if "+" in axis.word:
            return _unequal(part, i, axis, sizes)
    return [Cut("", part({}), _by_head(part, head, flat, {}))]


_RANK = {"expert": 0, "in": 1, "out": 3}
"""The order of X W: inputs, other axes, outputs. Experts come first, since each has its own matrix."""


def _by_head(part: _Make, head: int | None, flat: list[_Axis], chosen: Mapping[int, Range]) -> dict[int, Part]:
    return {} if head is None else {j: part({**chosen, head: j}) for j in range(flat[head].size)}


def _unequal(part: _Make, i: int, axis: _Axis, sizes: Mapping[str, int]) -> list[Cut]:
    """Roles of different sizes, one after the other along an axis."""
    result, start = [], 0
    for word in axis.word.split("+"):
        role, _, headed = word.partition(":")
        stop = start + sizes[role]
        width = sizes.get("dim", 0) if headed else 0
        count = sizes[role] // width if width else 0
        heads = {j: part({i: (start + j * width, start + (j + 1) * width)}) for j in range(count)}
        result.append(Cut(role, part({i: (start, stop)}), heads))
        start = stop
    return result


def axis_with_heads(axes: str, shape: tuple[int, ...]) -> tuple[list[str], int]:
    """The words and the length of the axis of heads. No words if there is none, or if the axes do not fit.

    >>> axis_with_heads("in (q/k/v head dim)", (4, 12))
    (['q/k/v', 'head', 'dim'], 12)
    """
    words = _words(axes)
    if len(words) == len(shape):
        for word, n in zip(words, shape, strict=True):
            if {"head", "dim"} <= set(word) or ":head" in word[0]:
                return word, n
    return [], 0


def _words(axes: str) -> list[list[str]]:
    """``in (head dim)`` → [["in"], ["head", "dim"]]."""
    result: list[list[str]] = []
    group: list[str] | None = None
    for token in axes.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            result.append(group or [])
            group = None
        elif group is not None:
            group.append(token)
        else:
            result.append([token])
    return result


def _factors(words: list[str], n: int, sizes: Mapping[str, int]) -> list[_Axis]:
    """Split a tensor axis of length n into the axes that its words name."""
    if "head" in words and "dim" in words and "dim" not in sizes:  # heads of unknown width: one axis
        words = [word for word in words if word != "head"]
    known = {word: size for word in words if (size := _known(word, sizes)) is not None}
    unknown = [word for word in words if word not in known]
    rest = n // max(prod(known.values()), 1)
    if len(unknown) > 1 or prod(known.values()) * (rest if unknown else 1) != n or not n:
        raise DoesNotFitError
    return [_Axis(word, known.get(word, rest)) for word in words]


def _known(word: str, sizes: Mapping[str, int]) -> int | None:
    if "/" in word:
        return len(word.split("/"))
    if "+" in word:
        roles = [role.partition(":")[0] for role in word.split("+")]
        if not all(role in sizes for role in roles):
            raise DoesNotFitError
        return sum(sizes[role] for role in roles)
    return sizes.get(word)
