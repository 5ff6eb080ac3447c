"""Code to type for a model whose architecture is not known: names for its layers and their parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from curvlens.errors import printable

_NUMBERED = re.compile(r"(?P<path>(?:.*?\.)?)(?P<i>\d+)\.(?P<role>.+)", re.DOTALL)
MOST = 16
"""Rows of a heat map that still fit a screen."""


def own_blocks(parameters: Iterable[str]) -> str:
    """The argument ``blocks=`` that names the parts of the largest list of modules, as code that runs as it is.

    A part is a module with parameters of its own, such as ``sa.q``; if these are many or nested, a child of the layer.
    If the modules of the list have different parts, it names whole layers. If there is no list, each of the first
    modules is a layer.

    >>> own_blocks(["tok.w", "cells.0.sa.q.w", "cells.0.ff.w", "cells.1.sa.q.w", "cells.1.ff.w"])
    "blocks={f'h.{i}.{role}': f'cells.{i}.{role}' for i in range(2) for role in ('sa.q', 'ff')}"
    >>> own_blocks(["first.weight", "first.bias", "last.weight"])
    "blocks={f'h.{i}': name for i, name in enumerate(('first', 'last'))}"
    """
    names = list(parameters)
    found = [match for name in names if (match := _NUMBERED.match(name))]
    if not found:
        modules = dict.fromkeys(_beginning(name, _shared(names)) for name in names)
        return f"blocks={{f'h.{{i}}': name for i, name in enumerate({_items(modules)})}}"
    path = Counter(match["path"] for match in found).most_common(1)[0][0]
    inside: dict[int, list[str]] = {}
    for match in found:
        if match["path"] == path:
            inside.setdefault(int(match["i"]), []).append(match["role"])
    layers = {i: _parts(names) for i, names in inside.items()}
    first = next(iter(layers.values()))
    numbers = f"range({len(layers)})" if list(layers) == list(range(len(layers))) else repr(tuple(layers))
    if any(set(roles) != set(first) for roles in layers.values()):
        return printable(f"blocks={{f'h.{{i}}': f'{path}{{i}}' for i in {numbers}}}")
    whole = f"f'h.{{i}}.{{role}}': f'{path}{{i}}.{{role}}' for i in {numbers} for role in {_items(first)}"
    return printable(f"blocks={{{whole}}}")


def _parts(names: Sequence[str]) -> list[str]:
    """The modules that own the parameters of a layer, or its children if these are many or one is inside another."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    nested = any(one.startswith(f"{other}.") for one in owners for other in owners)
    return owners if not nested and len(owners) <= MOST else list(dict.fromkeys(name.split(".")[0] for name in names))


def _items(names: Iterable[str]) -> str:
    return printable(repr(tuple(names)))


def _shared(names: Sequence[str]) -> int:
    """How many first words all names have in common, without the last word of any."""
    words = [name.split(".")[:-1] for name in names]
    shared = 0
    for level in zip(*words, strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return shared


def _beginning(name: str, shared: int) -> str:
    return ".".join(name.split(".")[: shared + 1])
