"""How a computation ended."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """How a computation ended, from the best to the worst: ``result.status is Status.CONVERGED``.

    A member equals its text: ``result.status == "converged"``. ``result.note`` has details for people, with numbers.

    >>> Status.CONVERGED == "converged", Status.CONVERGED.ok, Status.INTERRUPTED.ok
    (True, True, False)
    """

    EXACT = "exact"
    """Nothing was sampled: the number is exact up to rounding."""
    CONVERGED = "converged"
    """The requested accuracy is reached."""
    COMPLETE = "complete"
    """All requested work was done."""
    SAMPLED = "sampled"
    """All requested samples were taken; the error says how accurate the result is."""
    ACCURACY_NOT_REACHED = "accuracy_not_reached"
    """``max_samples`` were taken before ``rtol`` was reached."""
    STALLED = "stalled"
    """Rounding: further steps make no progress."""
    INCONSISTENT = "inconsistent"
    """The system has no solution; the result is a best fit."""
    NEGATIVE_CURVATURE = "negative_curvature"
    """A direction has curvature 0 or below, for which conjugate gradients do not work."""
    STOPPED_AT_BUDGET = "stopped_at_budget"
    """``budget`` or ``max_products`` was spent before the end."""
    INTERRUPTED = "interrupted"
    """Ctrl-C: the result has what was done before."""
    HAS_GAPS = "has_gaps"
    """Some terms cannot be computed and are NaN."""
    NOT_MEASURED = "not_measured"
    """Work ended before this was measured: the number is NaN."""

    @property
    def ok(self) -> bool:
        """Whether the result has all that was requested."""
        return _ORDER[self] <= _ORDER[Status.SAMPLED]


_ORDER = {status: place for place, status in enumerate(Status)}


def worst(statuses: Iterable[Status]) -> Status:
    """The status of a whole: that of its worst part; ``COMPLETE`` without parts.

    >>> worst([Status.EXACT, Status.INTERRUPTED, Status.SAMPLED])
    <Status.INTERRUPTED: 'interrupted'>
    """
    return max(statuses, key=_ORDER.__getitem__, default=Status.COMPLETE)
