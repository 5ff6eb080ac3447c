"""The progress of a run and its remaining time, from the measured seconds of units of the same kind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from curvlens.study.budget import readable_time
from curvlens.study.unit import Record, Unit


@dataclass(frozen=True)
class StudyProgress:
    """The progress of the run after a unit."""

    done: int
    """Units that ended, with a record or with an error."""
    total: int
    elapsed: float
    """Seconds since the run began."""
    left: float | None
    """The estimated seconds for the other units; None until a unit was measured."""
    last: str
    """The kind of the unit that ended last."""

    def __str__(self) -> str:
        left = "" if self.left is None else f", about {readable_time(self.left)} left"
        return f"{self.done} of {self.total} units, last of {self.last}{left}"


class Pace:
    """Mean seconds of the units of each kind."""

    def __init__(self, measured: Iterable[Record], jobs: int) -> None:
        self._seconds, self._count = Counter[str](), Counter[str]()
        self._jobs, self._start = jobs, time.monotonic()
        for record in measured:
            self.learn(record)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def learn(self, record: Record) -> None:
        """Include one more measured unit. Records of a table have no times."""
        if record.seconds > 0:
            self._seconds[record.kind] += record.seconds  # type: ignore[assignment]
            self._count[record.kind] += 1

    def expected(self, unit: Unit) -> float | None:
        """Seconds of a unit: the mean of its kind, else the mean of all; None if nothing was measured."""
        for seconds, count in (
            (self._seconds[unit.kind], self._count[unit.kind]),
            (self._seconds.total(), self._count.total()),
        ):
            if count:
                return seconds / count
        return None

    def left(self, units: Iterable[Unit]) -> float | None:
        """The seconds for all of these units, shared between all processes."""
        each = [self.expected(unit) for unit in units]
        return None if None in each else sum(seconds for seconds in each if seconds is not None) / self._jobs
