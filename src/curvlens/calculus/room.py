"""Checks whether there is enough memory for a result."""

from __future__ import annotations

from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.memory import available_bytes, readable

SMALL = 1 << 26
"""Bytes up to which the free memory is not checked."""


def require_room(numbers: int, like: Tensor, what: str, instead: str) -> None:
    """Raise an error with the size if this many numbers do not fit into the free memory."""
    needed = numbers * like.dtype.itemsize
    if needed < SMALL:
        return
    free = available_bytes(like.device)
    if needed > free:
        raise CurvlensError(f"{what} has {numbers} entries, {readable(needed)}; {readable(free)} are free. {instead}")
