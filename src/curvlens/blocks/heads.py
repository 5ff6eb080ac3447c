"""The number of heads of an attention, from ``heads=`` or from attributes of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from curvlens.blocks.family import HEAD_COUNTS
from curvlens.errors import CurvlensError, listing

Number = int | tuple[int, int]
"""A number of heads; with grouped queries a pair (queries, keys)."""
Heads = Number | Mapping[str, Number]
"""One number for all attentions, or numbers by name or pattern: ``{"h.0.attn": 6}``."""

QUERIES = (*HEAD_COUNTS, "heads", "nhead", "nheads", "n_attention_heads", "num_attn_heads")
"""Attribute names of modules and configurations for the number of query heads."""
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_key_value_heads")
"""Attribute names for the number of key and value heads, where groups of queries share them."""
CONFIGURATIONS = ("config", "cfg", "args", "hparams")
"""Attributes in which modules keep their settings."""


@dataclass(frozen=True)
class Count:
    """The heads of one attention."""

    queries: int
    keys: int | None = None
    """None if not given. The shapes then decide: the number is that of the queries if both have the same size."""

    def __str__(self) -> str:
        return str(self.queries) if self.keys is None else f"({self.queries}, {self.keys})"


class Said:
    """The user's ``heads=``."""

    def __init__(self, heads: Heads | None) -> None:
        given = heads if isinstance(heads, Mapping) else {} if heads is None else {"*": heads}
        self._counts = {pattern: _count(pattern, number) for pattern, number in given.items()}
        self._found: set[str] = set()
        self._met: list[str] = []

    def of(self, names: Sequence[str]) -> Count | None:
        """The user's number for the attention with these names; the first is the name of its blocks."""
        self._met.append(names[0])
        hits = [pattern for pattern in self._counts if any(fnmatchcase(name, pattern) for name in names)]
        self._found.update(hits)
        return self._counts[hits[0]] if hits else None

    def require_all_found(self) -> None:
        """Raise an error if a name or pattern matched no attention."""
        lost = [pattern for pattern in self._counts if pattern not in self._found]
        if lost:
            if not self._met:
                raise CurvlensError(
                    "heads= was given, but no attention is known in this model. Leave heads= out, or describe the "
                    "architecture by a Family of rules: Problem(..., blocks=family, heads=...)."
                )
            raise CurvlensError(
                f"heads= names {listing(lost)}, but no attention has this name. Use one of "
                f"{listing(dict.fromkeys(self._met))}."
            )


def _count(pattern: object, number: Any) -> Count:
    pair = number if isinstance(number, tuple) and len(number) == 2 else (number, number)
    good = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair)
    if not isinstance(pattern, str) or not good or pair[0] % pair[1]:
        raise CurvlensError(
            f"heads={number!r}, expected a number of heads (6), for grouped queries a pair (queries, keys) such as "
            "(6, 2), or a dict of these by attention, {'h.0.attn': 6}."
        )
    return Count(pair[0], pair[1] if isinstance(number, tuple) else None)


def told(around: Sequence[nn.Module], near: int) -> Iterator[tuple[Count, bool]]:
    """The numbers of heads in the modules around a parameter and in their configurations, the nearest first.

    Each comes with whether one of the first ``near`` modules has the number of queries.
    """
    own = set(_numbers(_tellers(around[:near]), QUERIES))
    tellers = _tellers(around)
    keys = next(_numbers(tellers, KEYS), None)
    for queries in dict.fromkeys(_numbers(tellers, QUERIES)):
        if keys is not None and queries % keys == 0:
            yield Count(queries, keys), queries in own
        yield Count(queries), queries in own


def _tellers(around: Sequence[nn.Module]) -> list[Any]:
    return [
        teller
        for module in around
        for teller in (module, *(getattr(module, name, None) for name in CONFIGURATIONS))
        if teller is not None
    ]


def nearby(chains: Iterable[Sequence[nn.Module]]) -> int:
    """The number of modules in the first chain whose head counts belong to this attention for certain.

    ``chains`` are the modules around each parameter of an attention. Certain are the first module that contains all
    parameters, the modules inside it, and modules of Hugging Face. A number further out may mean something else.
    """
    first, *others = chains
    held = [{id(module) for module in chain} for chain in others]
    own = next((i for i, module in enumerate(first) if all(id(module) in chain for chain in held)), 0)
    if isinstance(first[own], nn.Linear) or type(first[own]).__name__ == "Conv1D":
        own += 1  # a single projection: take the module around it
    settings = (getattr(getattr(module, "config", None), "model_type", None) for module in first)
    certain = [i for i, kind in enumerate(settings) if isinstance(kind, str) and kind]
    return max([own, *certain]) + 1


def _numbers(tellers: Iterable[Any], names: Iterable[str]) -> Iterator[int]:
    names = tuple(names)
    for teller in tellers:
        for name in names:
            number = teller.get(name) if isinstance(teller, Mapping) else getattr(teller, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                yield number
