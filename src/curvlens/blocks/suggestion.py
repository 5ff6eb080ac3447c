"""Code to type for a model whose architecture is not known: names for its layers and their parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from curvlens.errors import printable

_NUMBERED = re.compile(r"(?P<path>(?:.*?\.)?)(?P<i>\d+)\.(?P<role>[^.]+)", re.DOTALL)


def own_blocks(parameters: Iterable[str]) -> str:
    """The argument ``blocks=`` that names the parts of the largest list of modules, as code that runs as it is.

    If the modules of the list have different parts, it names whole layers. If there is no list, each of the first
    modules is a layer.

    >>> own_blocks(["tok.w", "cells.0.sa.q.w", "cells.0.ff.w", "cells.1.sa.q.w", "cells.1.ff.w"])
    "blocks={f'h.{i}.{role}': f'cells.{i}.{role}' for i in range(2) for role in ('sa', 'ff')}"
    >>> own_blocks(["first.weight", "first.bias", "last.weight"])
    "blocks={f'h.{i}': name for i, name in enumerate(('first', 'last'))}"
    """
    names = list(parameters)
    found = [match for name in names if (match := _NUMBERED.match(name))]
    if not found:
        modules = dict.fromkeys(_beginning(name, _shared(names)) for name in names)
        return f"blocks={{f'h.{{i}}': name for i, name in enumerate({_items(modules)})}}"
    path = Counter(match["path"] for match in found).most_common(1)[0][0]
    layers: dict[int, list[str]] = {}
    for match in found:
        if match["path"] == path and match["role"] not in layers.setdefault(int(match["i"]), []):
            layers[int(match["i"])].append(match["role"])
    first = next(iter(layers.values()))
    numbers = f"range({len(layers)})" if list(layers) == list(range(len(layers))) else repr(tuple(layers))
    if any(set(roles) != set(first) for roles in layers.values()):
        return printable(f"blocks={{f'h.{{i}}': f'{path}{{i}}' for i in {numbers}}}")
    whole = f"f'h.{{i}}.{{role}}': f'{path}{{i}}.{{role}}' for i in {numbers} for role in {_items(first)}"
    return printable(f"blocks={{{whole}}}")


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
