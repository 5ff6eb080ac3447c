"""Which keys a query sees, and how the scores are cut into tiles: some queries, and all keys that any of them sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 1 << 17
"""Scores of a tile: a few matrices of that size stay in the cache."""
FEWEST = 32
"""Queries of a tile, at least: fewer make slow products."""


@dataclass(frozen=True)
class Spec:
    """What attention is made of besides its tensors."""

    scale: float
    """c in c Q Kᵀ."""
    low: int | None = None
    """Query i sees no key before i + low."""
    high: int | None = None
    """Query i sees no key behind i + high."""
    softcap: float | None = None
    """t in t tanh(c Q Kᵀ/t), in the place of c Q Kᵀ."""


class Tile(NamedTuple):
    """Queries and the keys they see, each from one to before another."""

    first: int
    last: int
    first_key: int
    last_key: int

    @property
    def rows(self) -> slice:
        """The queries."""
        return slice(self.first, self.last)

    @property
    def keys(self) -> slice:
        """The keys."""
        return slice(self.first_key, self.last_key)

    @property
    def height(self) -> int:
        """Number of queries."""
        return self.last - self.first

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.last_key - self.first_key


def tiles(spec: Spec, queries: int, keys: int, groups: int) -> Iterator[Tile]:
    """All tiles in which a query sees a key, each with at most about `NUMBERS` scores of all heads of a group."""
    step = max(FEWEST, NUMBERS // max(1, keys * groups))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = 0 if spec.low is None else max(0, start + spec.low)
        last = keys if spec.high is None else min(keys, stop + spec.high)
        if first < last:
            yield Tile(start, stop, first, last)


def hide(scores: Tensor, tile: Tile, spec: Spec) -> None:
    """Put −∞ where a query of the tile does not see a key; ``scores`` (…, queries, keys)."""
    rows = torch.arange(tile.first, tile.last, device=scores.device)[:, None]
    if spec.high is not None:
        first = max(tile.first_key, tile.first + spec.high + 1)
        if first < tile.last_key:
            columns = torch.arange(first, tile.last_key, device=scores.device)
            scores[..., first - tile.first_key :].masked_fill_(columns > rows + spec.high, -math.inf)
    if spec.low is not None:
        last = min(tile.last_key, tile.last - 1 + spec.low)
        if tile.first_key < last:
            columns = torch.arange(tile.first_key, last, device=scores.device)
            scores[..., : last - tile.first_key].masked_fill_(columns < rows + spec.low, -math.inf)
