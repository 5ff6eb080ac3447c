"""Sensitive or not: whether a change over the seeds is beyond a factor, up or down."""

from __future__ import annotations

from curvlens.papers.comparisons import Ratio


def changes(found: Ratio, factor: float) -> bool | None:
    """Whether it is more than so many times larger or smaller; None if the interval does not tell.

    >>> changes(Ratio(9, 8, 10, 5), 5), changes(Ratio(0.1, 0.05, 0.15, 5), 5), changes(Ratio(2, 1, 4, 5), 5)
    (True, True, False)
    """
    up, down = found.above(factor), found.below(1 / factor)
    return True if up or down else None if None in (up, down) else False
