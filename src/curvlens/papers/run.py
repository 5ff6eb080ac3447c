"""Measure what is missing: on several cores, one thread each, every point stored as soon as it is there."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from curvlens.errors import CurvlensError, listing
from curvlens.memory import give_back
from curvlens.papers.experiment import Effort, Experiment
from curvlens.papers.lifeline import end_with
from curvlens.papers.records import Config, Record, rounded
from curvlens.papers.store import Store

Progress = Callable[[int, int, str], None]
"""(points done, points in all, what was measured last)."""


@dataclass(frozen=True)
class Outcome:
    """What a worker brings back of a point."""

    record: Record | None
    failure: str = ""


def missing(experiments: Sequence[Experiment], effort: Effort, store: Store) -> list[tuple[Experiment, Config]]:
    """Points that are not stored yet, those of shared data once."""
    known = {name: store.records(name) for name in dict.fromkeys(e.stored_as for e in experiments)}
    seen: set[str] = set()
    todo = []
    for experiment in experiments:
        for config in experiment.points(effort):
            key = experiment.key(config)
            if key not in known[experiment.stored_as] and key not in seen:
                seen.add(key)
                todo.append((experiment, config))
    return todo


def run(
    experiments: Sequence[Experiment],
    effort: Effort,
    store: Store,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> int:
    """Measure and store all missing points; how many those were."""
    try:
        from joblib import Parallel, delayed, parallel_config
        from joblib.externals.loky.process_executor import TerminatedWorkerError
    except ImportError as error:
        raise CurvlensError(
            "Experiments need joblib: install curvlens with its extra 'papers', in a clone by pip install '.[papers]'."
        ) from error
    with store.writing() as writer:
        todo = missing(experiments, effort, store)
        failures: list[str] = []
        # loky replaces a worker that has grown large, and warns; its points are measured all the same
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        with parallel_config(backend="loky", inner_max_num_threads=1):
            work = Parallel(n_jobs=min(jobs, max(1, len(todo))), return_as="generator_unordered")
            me = os.getpid()
            outcomes = work(delayed(_point)(me, e.measure, e.stored_as, e.revision, dict(c)) for e, c in todo)
            try:
                for done, outcome in enumerate(outcomes, start=1):
                    if outcome.record is None:
                        failures.append(outcome.failure)
                        continue
                    writer.add(outcome.record)
                    if progress is not None:
                        progress(done, len(todo), outcome.record.experiment)
            except TerminatedWorkerError as error:
                raise CurvlensError(
                    "A process that measured was ended from outside, perhaps since memory ran out. What is measured "
                    f"is kept: run the same command again{', with --jobs 1' if jobs > 1 else ''}."
                ) from error
    if failures:
        raise CurvlensError(
            f"{len(failures)} of {len(todo)} points failed, the others are stored: {listing(failures, 3)}"
        )
    return len(todo)


def _point(
    parent: int, measure: Callable[[Config], Mapping[str, Any]], name: str, revision: int, config: dict[str, Any]
) -> Outcome:
    """Measure one point, with one thread: more would add up in another order."""
    end_with(parent)
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        result = rounded(measure(config))
    except Exception as error:  # of one point; the others go on
        return Outcome(None, f"{name} {config}: {type(error).__name__}: {error}")
    finally:
        give_back()  # loky takes what the C library keeps for a leak, and starts a new process
    return Outcome(Record(name, revision, config, result, time.perf_counter() - start))


def measured(experiment: Experiment, effort: Effort, store: Store) -> list[Record]:
    """The stored points of an effort, in their order; those that are missing are left out."""
    known = store.records(experiment.stored_as)
    keys = (experiment.key(config) for config in experiment.points(effort))
    return [known[key] for key in keys if key in known]
