"""Visible keys, and tiles of the scores. A tile has some queries and all keys that any of them sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 1 << 17
"""Scores in a tile. A few matrices of this size fit the cache."""
FEWEST = 128
"""The smallest number of queries per thread in a tile. With fewer, products are slow."""
MOST_THREADS = 4
"""Tiles grow with the number of threads up to this one. All threads synchronise after each of the 500 to 1,000 steps of
a second derivative. A thread delayed by another process makes the others wait some milliseconds each time, so fewer
and larger steps are faster."""


@dataclass(frozen=True)
class Spec:
    """The settings of attention."""

    scale: float
    """c in c Q Kᵀ."""
    low: int | None = None
    """Query i sees no key before i + low."""
    high: int | None = None
    """Query i sees no key after i + high."""
    softcap: float | None = None
    """t in t tanh(c Q Kᵀ/t), which replaces c Q Kᵀ."""


class Tile(NamedTuple):
    """A range of queries and the range of keys they see; the last index is excluded."""

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
    """All tiles in which a query sees a key.

    A tile has about `NUMBERS` scores per thread, counted over all heads of a group, and at least `FEWEST` queries per
    thread.
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
    """Hides the keys of a tile that only some of its queries see. Tiles of equal shape share these masks."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._corners: dict[tuple[int, int, int, bool], Tensor] = {}

    def hide(self, scores: Tensor, tile: Tile) -> None:
        """Set the hidden scores to −∞; ``scores`` is (…, queries, keys)."""
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
        """The keys from first to last that lie after (``behind``) or before the visible keys of each query."""
        key = (tile.height, first - tile.first, last - first, behind)
        if key not in self._corners:
            rows = torch.arange(tile.first, tile.last, device=self._device)[:, None]
            columns = torch.arange(first, last, device=self._device)
            edge = rows + ((self._spec.high if behind else self._spec.low) or 0)
            self._corners[key] = columns > edge if behind else columns < edge
        return self._corners[key]
