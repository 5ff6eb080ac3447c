"""An experiment: points to measure, a function that measures one, and a function that reports them.

A point is a unit of a study whose kind is the name of the experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from curvlens import study as studies
from curvlens.papers.sizes import named_marks
from curvlens.papers.verdicts import Finding
from curvlens.report.charts import Chart
from curvlens.study import Config, Record, Study, StudyProgress, Unit


@dataclass(frozen=True)
class Effort:
    """How much is computed."""

    quick: bool = False
    """Small settings: minutes for everything on two cores."""
    seeds: int | None = None
    """Number of repeats, instead of the experiment's own."""

    @property
    def name(self) -> str:
        """The folder name for the pages of this effort.

        >>> Effort().name, Effort(quick=True, seeds=3).name
        ('full', 'quick-3-seeds')
        """
        return ("quick" if self.quick else "full") + ("" if self.seeds is None else f"-{self.seeds}-seeds")

    def repeats(self, quick: int, full: int) -> range:
        """The seeds."""
        return range(self.seeds if self.seeds is not None else quick if self.quick else full)


@dataclass(frozen=True)
class Number:
    """A measured number that has a reference."""

    name: str
    """As in the table of reference numbers."""
    value: float
    error: float
    """Half of the 95 % interval over the repeats; 0 if exact, infinite for one repeat."""
    window: tuple[float, float] | None = None
    """For a slope: the first and the last σ of the fit."""
    width: int | None = None
    """Width of the measured networks, if it matters."""
    spread: float | None = None
    """For a mean: the standard deviation of one repeat."""


def at_width(records: Sequence[Record], numbers: Iterable[Number]) -> tuple[Number, ...]:
    """The numbers with the width of their networks."""
    return tuple(replace(each, width=records[0].config["width"]) for each in numbers)


@dataclass(frozen=True)
class Law:
    """A fitted power law and its prediction."""

    name: str
    predicted: float | None
    """None if there is no prediction."""
    slope: float
    interval: tuple[float, float]
    """95 %, over the repeats."""
    window: tuple[float, float]
    """The range of σ in which the local slopes agree."""
    steepest: float
    flattest: float
    """The largest and the smallest local slope of the whole curve."""


@dataclass(frozen=True)
class Report:
    """What the measurements of an experiment say."""

    charts: tuple[Chart, ...] = ()
    findings: tuple[Finding, ...] = ()
    numbers: tuple[Number, ...] = ()
    laws: tuple[Law, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the data for the reader, such as points that overflowed."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table."""

    name: str
    title: str
    source: str
    """The paper, and the place in it."""
    points: Callable[[Effort], Sequence[Config]]
    measure: Callable[[Config], Mapping[str, Any]]
    """The numbers of a point, from its configuration alone. Must be a module-level function."""
    report: Callable[[Sequence[Record]], Report]
    """The report on the points of one effort, in their order."""
    revision: int = 1
    """Raise it when `measure` gives other numbers for the same configuration."""
    data: str | None = None
    """The name of the experiment whose points this one uses instead of its own."""

    @property
    def stored_as(self) -> str:
        """The name of the experiment that its points are stored under."""
        return self.data or self.name

    def unit(self, config: Config) -> Unit:
        """A point, as a study stores it."""
        return Unit(self.stored_as, self.revision, config)

    def units(self, effort: Effort) -> list[Unit]:
        """The points of an effort, in their order."""
        return [self.unit(config) for config in self.points(effort)]


def missing(experiments: Sequence[Experiment], effort: Effort, study: Study) -> list[Unit]:
    """Points that are not stored yet. Shared points are listed once."""
    return study.missing(unit for experiment in experiments for unit in experiment.units(effort))


def measured(experiment: Experiment, effort: Effort, study: Study) -> list[Record]:
    """The stored points of an effort, in their order, without those that are missing."""
    known = study.records(experiment.stored_as)
    return [known[unit.key] for unit in experiment.units(effort) if unit.key in known]


def run(
    experiments: Sequence[Experiment],
    effort: Effort,
    study: Study,
    *,
    jobs: int = 1,
    progress: Callable[[StudyProgress], None] | None = None,
) -> int:
    """Measure and store all missing points, with one thread each. Returns their number."""
    units = [unit for experiment in experiments for unit in experiment.units(effort)]
    work = {each.stored_as: partial(_point, each.measure) for each in reversed(experiments)}
    return studies.run(study, units, work, jobs=jobs, progress=progress).done


def _point(measure: Callable[[Config], Mapping[str, Any]], config: Config) -> Mapping[str, Any]:
    found: dict[str, Any] = named_marks(measure(config))
    return found
