"""Networks of several depths: the norms of every layer's blocks over the size of the embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens.papers.parts import PARTS
from curvlens.papers.sweeps import Sweep, sweep, where
from curvlens.study import Record


def depths(records: Sequence[Record]) -> list[int]:
    """That were measured."""
    return sorted({record.config["depth"] for record in records})


def layers(records: Sequence[Record]) -> list[tuple[int, int]]:
    """All pairs of a depth and a layer, counted from 1."""
    return [(depth, layer) for depth in depths(records) for layer in range(1, depth + 1)]


def of_layer(records: Sequence[Record], depth: int, letter: str, layer: int, part: str) -> Sweep:
    """‖H‖ of a weight of a layer, counted from 1, in the networks of a depth."""
    return sweep(where(records, depth=depth), "sigma", "norms", letter, layer - 1, PARTS.index(part))
