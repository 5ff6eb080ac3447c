"""The map of a model as lines of text."""

from __future__ import annotations

from collections.abc import Iterable

from curvlens.blocks.block import Block
from curvlens.errors import printable


def lines(blocks: Iterable[Block]) -> list[str]:
    """A heading, and a line for each block: its names, size, heads and parts."""
    rows = [("block", "numbers", "heads", "is")]
    for block in blocks:
        name = printable(" = ".join((block.name, *block.aliases)))
        parts = printable(_shortened([p.key for p in block.parts]))
        rows.append((name, str(block.size), str(block.n_heads or ""), parts))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


def _shortened(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")
