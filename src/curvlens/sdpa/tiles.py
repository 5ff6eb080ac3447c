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
FEWEST = 128
"""Queries of a tile for each thread, at least: fewer make slow products."""
MOST_THREADS = 4
"""Threads for which tiles grow. All threads meet after each of the 500 to 1,000 steps of a second derivative, and a
thread that another process holds up keeps the others waiting, some milliseconds each time: fewer, larger steps."""


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
    """All tiles in which a query sees a key, each with at most about `NUMBERS` scores a thread of all heads of a group.

    A tile has `FEWEST` queries a thread at least.
    """
    threads = min(torch.get_num_threads(), MOST_THREADS)
    step = threads * max(FEWEST, NUMBERS // max(1, keys * groups))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = 0 if spec.low is None else max(0, start + spec.low)
        last = keys if spec.high is None else min(keys, stop + spec.high)
        if first < last:
            yield Tile(start, stop, first, last)


class Sight:
    """Where a query of a tile does not see a key that another one does; tiles of one shape share their corners."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._corners: dict[tuple[int, int, int, bool], Tensor] = {}

    def hide(self, scores: Tensor, tile: Tile) -> None:
        """Put −∞ there; ``scores`` (…, queries, keys)."""
        if self._spec.high is not None:
            first = max(tile.first_key, tile.first + self._spec.high + 1)
            if first < tile.last_key:
                corner = self._corner(tile, first, tile.last_key, behind=True)
                scores[..., first - tile.first_key :].masked_fill_(corner, -math.inf)
        if self._spec.low is not None:
            last = min(tile.last_key, tile.last - 1 + self._spec.low)
            if tile.first_key < last:
                corner = self._corner(tile, tile.first_key, last, behind=False)
                scores[..., : last - tile.first_key].masked_fill_(corner, -math.inf)

    def _corner(self, tile: Tile, first: int, last: int, *, behind: bool) -> Tensor:
        """Which keys from first to last lie behind what a query of the tile sees, or before."""
        key = (tile.height, first - tile.first, last - first, behind)
        if key not in self._corners:
            rows = torch.arange(tile.first, tile.last, device=self._device)[:, None]
            columns = torch.arange(first, last, device=self._device)
            edge = rows + ((self._spec.high if behind else self._spec.low) or 0)
            self._corners[key] = columns > edge if behind else columns < edge
        return self._corners[key]
