"""The sign test: which of two is larger in most pairs, for numbers that may be zero and so have no ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEVEL = 0.05
"""Two-sided: so rarely would pairs without a difference be as one-sided as that."""


def larger(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> bool | None:
    """Whether the first of a pair is larger as a rule; None if the pairs do not tell. Equal ones do not count.

    >>> larger([2] * 6, [1] * 6), larger([1] * 6, [2] * 6), larger([2] * 5, [1] * 5)
    (True, False, None)
    """
    signs = [one > other for one, other in zip(first, second, strict=True) if one != other]
    rarer = min(sum(signs), len(signs) - sum(signs))
    tail = sum(math.comb(len(signs), k) for k in range(rarer + 1)) / 2 ** len(signs)
    return 2 * sum(signs) > len(signs) if 2 * tail <= level else None
