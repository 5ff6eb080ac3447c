"""How a computation ended."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """How a computation ended, from the best to the worst: ``result.status is Status.CONVERGED``.

    A member is also its text: ``result.status == "converged"``. ``result.note`` says the same to people, with numbers.

    >>> Status.CONVERGED == "converged", Status.CONVERGED.ok, Status.INTERRUPTED.ok
    (True, True, False)
    """

    EXACT = "exact"
    """Nothing was sampled: the number is exact to rounding."""
    CONVERGED = "converged"
    """The accuracy that was asked for is reached."""
    COMPLETE = "complete"
    """All that was asked for was done."""
    SAMPLED = "sampled"
    """As many samples as were asked for; the error says how good they are."""
    ACCURACY_NOT_REACHED = "accuracy_not_reached"
    """``max_samples`` were taken before ``rtol`` was reached."""
    STALLED = "stalled"
    """Rounding: further steps bring nothing."""
    INCONSISTENT = "inconsistent"
    """The system has no solution; the result fits it best."""
    NEGATIVE_CURVATURE = "negative_curvature"
    """A direction with curvature of 0 or below, which conjugate gradients cannot take."""
    STOPPED_AT_BUDGET = "stopped_at_budget"
    """``budget`` or ``max_products`` was spent first."""
    INTERRUPTED = "interrupted"
    """Ctrl-C: the result has what was done by then."""
    HAS_GAPS = "has_gaps"
    """Some terms cannot be computed and are NaN."""
    NOT_MEASURED = "not_measured"
    """Work ended before its turn came: the number is NaN."""

    @property
    def ok(self) -> bool:
        """Whether all that was asked for is there."""
        return _ORDER[self] <= _ORDER[Status.SAMPLED]


_ORDER = {status: place for place, status in enumerate(Status)}


def worst(statuses: Iterable[Status]) -> Status:
    """The status of a whole: that of its worst part; of nothing, complete.

    >>> worst([Status.EXACT, Status.INTERRUPTED, Status.SAMPLED])
    <Status.INTERRUPTED: 'interrupted'>
    """
    return max(statuses, key=_ORDER.__getitem__, default=Status.COMPLETE)
