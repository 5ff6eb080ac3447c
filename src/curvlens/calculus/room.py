"""Whether there is memory for what is asked for."""

from __future__ import annotations

from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.memory import available_bytes, readable

SMALL = 1 << 26
"""Bytes for which it is not worth asking whether there is room."""


def require_room(numbers: int, like: Tensor, what: str, instead: str) -> None:
    """Refuse what does not fit the memory that is free, and say its size."""
    needed = numbers * like.dtype.itemsize
    if needed < SMALL:
        return
    free = available_bytes(like.device)
    if needed > free:
        raise CurvlensError(f"{what} has {numbers} entries, {readable(needed)}; {readable(free)} are free. {instead}")
