"""The blocks of two states. Of (a, b) and (b, a) only one is stored: the one with the later state first.

A block is (B, ·, ·), or (B, T, ·, ·) if it is zero between two tokens.
"""

from __future__ import annotations

from torch import Tensor

from curvlens.assembly.primitives import add_rows, by_rows


class Pairs:
    """Blocks by the numbers of two states."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Tensor] = {}
        self._ours: set[tuple[int, int]] = set()
        """Blocks that share no memory with others, so that one may add to them in place."""

    def add(self, first: int, second: int, block: Tensor) -> None:
        """Add a block and, below the diagonal, its transpose. The block of a state with itself must be symmetric."""
        if first < second:
            first, second, block = second, first, block.mT
        key = (first, second)
        known = self._blocks.get(key)
        if known is None:
            self._blocks[key] = block
            return
        if key not in self._ours:
            self._ours.add(key)
            if known.ndim == block.ndim:
                self._blocks[key] = known + block
                return
            known = known.clone() if known.ndim == 3 else known
        if known.ndim == block.ndim:
            known += block
        elif known.ndim == 3:
            add_rows(known, block)
        else:
            known = by_rows(known).add_(block)
        self._blocks[key] = known

    def pop(self, state: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Remove the block of the last state with itself, and those with the states before it."""
        mine = [key for key in self._blocks if key[0] == state]
        self._ours.difference_update(mine)
        found = {second: self._blocks.pop((state, second)) for _, second in mine}
        return found.pop(state, None), found
