"""Does the missing units, here or in several processes. Every record is stored as soon as it is complete."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, listing
from curvlens.interrupts import all_or_nothing
from curvlens.memory import give_back
from curvlens.study.budget import Budget, parse_budget
from curvlens.study.folder import Study
from curvlens.study.lifeline import end_with
from curvlens.study.progress import Pace, StudyProgress
from curvlens.study.unit import Config, Record, Unit


@dataclass(frozen=True)
class Measured:
    """The result of a unit with tensors. A result of numbers alone may be a mapping."""

    result: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


Work = Callable[[Config], Mapping[str, Any] | Measured]
"""Does a unit from its configuration alone. Define it at the top of a module, so that other processes can import it."""


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    done: int
    """The number of units that were done and stored."""
    left: int
    """The number of units left when the budget ended. The same call continues with them."""


@dataclass(frozen=True)
class _Ended:
    """The outcome of a unit."""

    unit: Unit
    record: Record | None
    failure: str = ""


def run(
    study: Study,
    units: Iterable[Unit],
    work: Mapping[str, Work],
    *,
    jobs: int = 1,
    threads: int | None = 1,
    budget: str | float | Budget | None = None,
    gradients: Callable[[Unit], float] | None = None,
    progress: Callable[[StudyProgress], None] | None = None,
) -> Finished:
    """Do and store all units that the study does not have yet. ``work`` maps each kind to a function.

    ``jobs`` is the number of processes; 0 or 1 uses this one. Each unit has ``threads`` threads, so that sums are added
    in the same order for any ``jobs``; None keeps torch's own number. If a unit fails, the others continue.

    With a ``budget`` a unit starts only if it is expected to end in time, and no unit is aborted. Units are done in
    order. A budget of gradients needs ``gradients``, the cost of a unit; it does the same units on every machine.
    """
    if type(jobs) is not int or jobs < 0:
        raise CurvlensError(f"jobs={jobs!r:.40} is not a number of processes. Give a whole number, as jobs=2.")
    limit = parse_budget(budget)
    if limit is not None and limit.gradients is not None and gradients is None:
        raise CurvlensError(f"budget={str(limit)!r} needs the cost of a unit. Give run(…, gradients=lambda unit: 2.0).")
    units = list(units)
    if unknown := sorted({unit.kind for unit in units} - work.keys()):
        raise CurvlensError(f"There is no work for units of {listing(unknown)}. Give run(…, work={{kind: function}}).")
    with study.writing():
        todo = study.missing(units)
        jobs = max(1, min(jobs, len(todo)))
        known = (r for kind in {u.kind for u in todo} for r in study.records(kind).values())
        pace = Pace(known, jobs)
        fitting = _Fitting(todo, limit, gradients, pace)
        ended = _here(fitting, work, threads) if jobs == 1 else _elsewhere(fitting, work, threads, jobs, limit)
        failures: list[str] = []
        left = {unit.key: unit for unit in todo}
        for done, each in enumerate(ended, start=1):
            del left[each.unit.key]
            if each.record is None:
                failures.append(each.failure)
            else:
                study.add(each.record)
                pace.learn(each.record)
            if progress is not None:
                last = each.unit.kind
                progress(StudyProgress(done, len(todo), pace.elapsed, pace.left(left.values()), last))
    if failures:
        raise CurvlensError(
            f"{len(failures)} of {len(todo)} units failed, the others are stored: {listing(failures, 3)}"
        )
    return Finished(len(todo) - len(left), len(left))


class _Fitting(Iterator[Unit]):
    """Yields units one by one, as long as the next one fits the budget."""

    def __init__(
        self, units: Sequence[Unit], limit: Budget | None, cost: Callable[[Unit], float] | None, pace: Pace
    ) -> None:
        self._units, self._limit, self._cost, self._pace = iter(units), limit, cost, pace
        self._spent = 0.0

    def __next__(self) -> Unit:
        unit = next(self._units)
        if self._limit is None:
            return unit
        if self._limit.seconds is not None:
            end = self._pace.elapsed + (self._pace.expected(unit) or 0.0)
            if end > self._limit.seconds:
                self._stop()
        elif self._cost is not None and self._limit.gradients is not None:
            self._spent += self._cost(unit)
            if self._spent > self._limit.gradients * (1 + 1e-12):
                self._stop()
        return unit

    def _stop(self) -> NoReturn:
        self._units = iter(())
        raise StopIteration


def _here(units: Iterator[Unit], work: Mapping[str, Work], threads: int | None) -> Iterator[_Ended]:
    return (_do(unit, work[unit.kind], threads) for unit in units)


def _elsewhere(
    units: Iterator[Unit], work: Mapping[str, Work], threads: int | None, jobs: int, limit: Budget | None
) -> Iterator[_Ended]:
    try:
        from joblib import Parallel, delayed, parallel_config
        from joblib.externals.loky.process_executor import TerminatedWorkerError
    except ImportError as error:
        raise CurvlensError(
            "Several processes need joblib. Use jobs=1, or install curvlens with its extra 'papers', in a clone by "
            "pip install '.[papers]'."
        ) from error
    me = os.getpid()
    with parallel_config(backend="loky", inner_max_num_threads=threads), warnings.catch_warnings():
        # loky replaces a worker that has grown large, with a warning; its units are still done
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        ahead = jobs if limit is not None and limit.seconds is not None else 2 * jobs
        pool = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=ahead)
        try:
            yield from pool(delayed(_in_worker)(me, unit, work[unit.kind], threads) for unit in units)
        except TerminatedWorkerError as error:
            raise CurvlensError(
                "A worker process was killed, perhaps because memory ran out. Finished units are kept. Run the same "
                "command again, with --jobs 1 or jobs=1."
            ) from error


def _in_worker(parent: int, unit: Unit, work: Work, threads: int | None) -> _Ended:
    end_with(parent)
    return _do(unit, work, threads)


def _do(unit: Unit, work: Work, threads: int | None) -> _Ended:
    """Do one unit. An error is reported, and the other units continue."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    try:
        config = copy.deepcopy(dict(unit.config))  # the function may write into its configuration
        found = all_or_nothing(lambda: work(config))
        found = found if isinstance(found, Measured) else Measured(found)
        seconds = time.perf_counter() - start
        record = Record(unit.kind, unit.revision, unit.config, found.result, seconds, found.tensors)
    except Exception as error:
        return _Ended(unit, None, f"{unit.kind} {dict(unit.config)}: {type(error).__name__}: {error}")
    finally:
        torch.set_num_threads(before)
        give_back()  # otherwise loky mistakes memory kept by the C library for a leak and starts a new process
    return _Ended(unit, record)
