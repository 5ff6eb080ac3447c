"""`curvlens.analyze`: measure what the budget allows, unit by unit, and write the page."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from curvlens.analysis import subject
from curvlens.analysis.clock import Clock
from curvlens.analysis.document import document
from curvlens.analysis.instrument import Instrument
from curvlens.analysis.known import Known
from curvlens.analysis.plan import Plan, planned
from curvlens.analysis.result import Analysis
from curvlens.analysis.room import Room
from curvlens.analysis.schedule import Step, schedule, unit
from curvlens.analysis.tokens import n_samples
from curvlens.analysis.writing import rehearsed
from curvlens.dynamics.advice import sentences
from curvlens.dynamics.recommendations import recommendations
from curvlens.dynamics.stability import require_edges
from curvlens.errors import CurvlensError, a_kind
from curvlens.interrupts import all_or_nothing
from curvlens.memory import parse_bytes
from curvlens.problem import Problem
from curvlens.results import Eigs, Status
from curvlens.study import Budget, Record, Study, Unit, parse_budget
from curvlens.study.budget import readable_time

FIRST = ("clock", "start")
"""Kinds that are done whatever the budget is: without them nothing can be planned."""
MOST_SEED = 1 << 40
"""Seeds of units are a million times as large, and are stored in 64 bits."""
MARGIN = 1.3
"""Seconds of a unit may be so many times what is expected, until units of its kind were timed."""
MANY = ("block", "ends")
"""Kinds of many small units. Others may be cheap once, because they converged early, and not the next time."""


@dataclass(frozen=True)
class Now:
    """How far an analysis is: for a progress display."""

    stage: str
    what: str
    spent: float
    """Share of the budget, from 0 to 1."""
    elapsed: float
    left: float | None
    """Seconds, as far as they are known."""
    inside: tuple[int, int | None] | None = None
    """Done and all, of the unit at work."""


def analyze(
    problem: Problem,
    out: str | os.PathLike[str] = "run",
    budget: str | float | Budget | None = "10m",
    *,
    memory: int | float | str | None = None,
    optimizer: Any = None,
    seed: int = 0,
    name: str = "",
    decode: Callable[[Sequence[int]], Sequence[str]] | None = None,
    minimal: bool = False,
    private: bool = False,
    dry_run: bool = False,
    about: Mapping[str, Any] | None = None,
    announce: Callable[[Plan], None] | None = None,
    progress: Callable[[Now], None] | None = None,
) -> Analysis:
    """Measure the curvature of a problem within a budget, and write ``out/index.html``.

    Everything is measured coarsely first, then finer where the errors are largest. Each unit of work is stored when it
    is done: a run that was ended goes on where it was, and one with a larger budget refines what is there. Ctrl-C ends
    it with the page of what is known.

    Args:
        problem: model, data and loss.
        out: a folder, new or of the same problem.
        budget: a time (``"10m"``), a cost (``"500 gradients"``, which does the same on every machine), or None for all
            that is worth it. Work that is stored already counts.
        memory: what graphs may take at most, as ``"4GiB"``. Default: what the problem has.
        optimizer: a torch optimiser or its state, for the panel on stability. Default: gradient descent, momentum and
            Adam in general.
        seed: of all probes.
        name: of the model, for the title.
        decode: token ids to texts, for the tokens that eigenvectors move.
        minimal: only the summary, the heat map and the spectrum.
        private: no text of the data on the page.
        dry_run: stop after the plan.
        about: more for the provenance, as the command line.
        announce: is called with the `Plan`.
        progress: is called with `Now` as work goes on.
    """
    if not isinstance(problem, Problem):
        raise CurvlensError(f"analyze takes a curvlens.Problem, got {a_kind(problem)}.")
    begun = time.monotonic()
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MOST_SEED:
        raise CurvlensError(f"seed={seed!r}, expected a whole number from 0 to 2^40.")
    if memory is not None:
        problem = problem._with(problem._evaluation.within(parse_bytes(memory)))
    if optimizer is not None:
        require_edges(problem, optimizer)  # at once, and not after all else was measured
    run = _Run(problem, out, parse_budget(budget), optimizer, seed, minimal, progress, begun)
    plan = run.prepare(dry_run=dry_run)
    if announce is not None:
        announce(plan)
    ended = "planned" if dry_run else run.measure()
    facts = {
        "name": name or type(problem.model).__name__,
        "model": type(problem.model).__name__,
        "parameters": problem.layout.size,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "loss_name": repr(problem.loss_function),
        "family": problem.blocks.family,
        "budget": "none" if run.budget is None else str(run.budget),
        "seed": seed,
        "minimal": minimal,
        "ended": ended,
        "left": run.left(),
        "failed": run.failures,
        "cost": run.costs(plan),
        "provenance": {
            "curvlens": version("curvlens"),
            "torch": torch.__version__,
            "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "threads": torch.get_num_threads(),
            **dict(about or {}),
        },
    }
    content = document(problem, run.known, facts)
    if decode is not None and not private:
        try:
            _with_texts(content, decode)
        except Exception as error:  # of the caller's function: what was measured is worth more
            why = f"decode= raised {type(error).__name__}: {error}"
            content["failed"].append({"kind": "texts", "stage": "panels", "why": why})
    if private:
        _without_texts(content)
    content["sentences"] = [dataclasses.asdict(each) for each in sentences(content)]
    content["advice"] = [dataclasses.asdict(each) for each in recommendations(content)]
    analysis = Analysis(content, str(run.study.folder), plan)
    if not dry_run:
        analysis.write()
    return analysis


class _Run:
    """One call of `analyze`."""

    def __init__(
        self,
        problem: Problem,
        out: str | os.PathLike[str],
        budget: Budget | None,
        optimizer: Any,
        seed: int,
        minimal: bool,
        progress: Callable[[Now], None] | None,
        begun: float,
    ) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.study = Study(out, identity=subject.identity(problem, seed, optimizer))
        self.progress = progress
        self.instrument = Instrument(
            problem, shuffled=subject.shuffled(problem, seed), optimizer=optimizer, progress=self._inside
        )
        self.instrument.vectors, self.instrument.pairs = self._vector, self._pairs
        self.known = Known({name: block.size for name, block in problem.blocks.items()})
        self.optimizer, self.minimal = optimizer, minimal
        self.stored: dict[str, Record] = {}
        self.spent: dict[str, list[float]] = {}
        """Seconds and gradients by stage."""
        self.failures: list[dict[str, str]] = []
        self.skipped: dict[str, list[float]] = {}
        """Seconds and gradients by stage that did not fit."""
        self.begun = begun
        self.seconds_before = 0.0
        self._now: Now | None = None
        self._unheard: Exception | None = None

    # Before

    def prepare(self, *, dry_run: bool) -> Plan:
        """Time one gradient and one product; the plan."""
        work = self.instrument.work()
        self.stored = {key: record for kind in work for key, record in self.study.records(kind).items()}
        self.seconds_before = sum(record.seconds for record in self.stored.values())
        record = self.stored.get(unit("clock").key)
        if record is None:
            record = self._measured(unit("clock"))
            if not dry_run:
                self._store(record)
        samples = n_samples(self.problem)
        self.clock = Clock.of(record, samples)
        self.writing = rehearsed(self.problem.blocks.values())
        limit = math.inf
        if self.budget is not None:
            limit = self.budget.gradients or (self.budget.seconds or 0.0) / self.clock.gradient
        least = 40.0
        if limit < least:
            seconds = least * self.clock.gradient
            raise CurvlensError(
                f"budget={str(self.budget)!r} is about {limit:.0f} gradients of this problem, too few for anything. "
                f"The smallest that is useful is '{math.ceil(least)} gradients', about {readable_time(seconds)} here."
            )
        if self.budget is not None and self.budget.seconds is not None:
            limit -= self._reserve() / self.clock.gradient
        self.outline = subject.outline(
            self.problem,
            has_ggn="G" in self.instrument.operators,
            optimizer=self.optimizer,
            seed=self.seed,
            budget=limit,
            minimal=self.minimal,
        )
        return planned(self.outline, self.clock, self.budget, Room(self.problem).of, self.writing)

    # The work

    def measure(self) -> str:
        """Do what fits; how it ended."""
        try:
            with self.study.writing():
                for step in schedule(self.outline, self.known):
                    self._take(step)
        except KeyboardInterrupt:
            return "interrupted"
        return "stopped at budget" if self.skipped else "complete"

    def _take(self, step: Step) -> None:
        record = self.stored.get(step.unit.key)
        if record is None:
            if not self._fits(step):
                left = self.skipped.setdefault(step.stage, [0.0, 0.0])
                left[0] += self.clock.seconds(step)
                left[1] += step.cost
                self.known.skip(step.unit)
                return
            self._tell(step)
            try:
                record = self._measured(step.unit)
            except Exception as error:  # of this unit alone: the others may work
                if error is self._unheard:
                    raise
                why = str(error) if isinstance(error, CurvlensError) else f"{type(error).__name__}: {error}"
                self.failures.append({"kind": step.unit.kind, "stage": step.stage, "why": why})
                self.known.skip(step.unit)
                return
            self._store(record)
        in_time = self.budget is not None and self.budget.seconds is not None
        cost = record.seconds / self.clock.gradient if in_time else step.cost
        self.known.add(record, cost, self.clock.seconds(step))
        seconds_and_cost = self.spent.setdefault(step.stage, [0.0, 0.0])
        seconds_and_cost[0] += record.seconds
        seconds_and_cost[1] += step.cost

    def _fits(self, step: Step) -> bool:
        if step.unit.kind in FIRST or self.budget is None:
            return True
        if self.budget.gradients is not None:
            return self.known.cost + step.cost <= self.budget.gradients
        return self._elapsed() + self._expected(step) <= (self.budget.seconds or 0.0) - self._reserve()

    def _reserve(self) -> float:
        """Seconds of a budget that are kept for the page: a third at most, since a page needs numbers."""
        seconds = None if self.budget is None else self.budget.seconds
        return min(self.writing.seconds, (seconds or 0.0) / 3)

    def _elapsed(self) -> float:
        """Seconds of work so far, those of earlier runs included."""
        return self.seconds_before + time.monotonic() - self.begun

    def _expected(self, step: Step) -> float:
        """Seconds of a step by the clock, corrected by what was measured since: of its kind, or else of all."""
        planned = self.clock.seconds(step)
        ratio, alike = self.known.pace(step.unit.kind)
        if alike and step.unit.kind in MANY:
            return planned * ratio
        return planned * max(ratio, 1.0) * (1.1 if alike else MARGIN)

    def _measured(self, unit: Unit) -> Record:
        start = time.perf_counter()
        found = all_or_nothing(lambda: self.instrument.work()[unit.kind](unit.config))
        result, tensors = (found, {}) if isinstance(found, Mapping) else (found.result, found.tensors)
        return Record(unit.kind, unit.revision, unit.config, result, time.perf_counter() - start, tensors)

    def _store(self, record: Record) -> None:
        """Keep a record on disk. A full disk ends the analysis with an error: what is stored stays."""
        self.study.add(record)
        self.stored[record.key] = record

    def _vector(self, place: Sequence[Any]) -> Tensor:
        key, number = place
        return self.stored[key].tensors["vectors"][:, number].to(self.problem.device)

    def _pairs(self, key: str) -> Eigs:
        record = self.stored[key]
        vectors, numbers = record.tensors["vectors"].to(self.problem.device), record.result
        pairs = (torch.tensor(numbers[x], dtype=torch.float64, device="cpu") for x in ("values", "residuals"))
        values, residuals = (x.to(vectors) for x in pairs)
        status, norm = Status(numbers["status"]), float(values.abs().max())
        converged, tol = torch.tensor(numbers["converged"]), float(record.config["tol"])
        return Eigs(values, vectors, residuals, converged, status, tol, norm, numbers["products"], 0, "both")

    # What it tells

    def _tell(self, step: Step) -> None:
        if self.progress is None:
            return
        config = step.unit.config
        what = " ".join(str(config[name]) for name in ("operator", "block", "role", "path") if config.get(name))
        share, left = self.known.cost / self.outline.budget, None
        if self.budget is not None and self.budget.seconds is not None:
            left = max(self.budget.seconds - self._elapsed(), 0.0)
            share = min(self._elapsed() / self.budget.seconds, 1.0)
        elif self.budget is not None:
            left = max(self.outline.budget - self.known.cost, 0.0) * self.clock.gradient
        self._now = Now(step.stage, what or step.unit.kind, min(share, 1.0), self._elapsed(), left)
        self.progress(self._now)

    def _inside(self, done: int, total: int | None) -> None:
        if self.progress is not None and self._now is not None:
            now = dataclasses.replace(self._now, inside=(done, total), elapsed=self._elapsed())
            try:
                self.progress(now)
            except Exception as error:
                self._unheard = error  # the caller's error, not one of the unit
                raise

    def left(self) -> list[dict[str, Any]]:
        """Stages of which something did not fit, with what it would take."""
        return [
            {"stage": stage, "seconds": seconds, "gradients": cost} for stage, (seconds, cost) in self.skipped.items()
        ]

    def costs(self, plan: Plan) -> list[dict[str, Any]]:
        """Stage by stage: planned and real."""
        wanted = {stage.name: stage for stage in plan.stages}
        names = dict.fromkeys((*wanted, *self.spent))
        return [
            {
                "stage": name,
                "planned": wanted[name].seconds if name in wanted else 0.0,
                "seconds": self.spent.get(name, [0.0, 0.0])[0],
                "gradients": self.spent.get(name, [0.0, 0.0])[1],
            }
            for name in names
        ]


def _with_texts(content: dict[str, Any], decode: Callable[[Sequence[int]], Sequence[str]]) -> None:
    for vector in content["eigenvectors"]:
        for token in vector.get("tokens", {}).get("tokens", ()):
            token["text"] = [str(text) for text in decode(token["before"])] if token["before"] else []
            token["label_text"] = "".join(map(str, decode([token["label"]]))) if token["label"] >= 0 else ""


def _without_texts(content: dict[str, Any]) -> None:
    for vector in content["eigenvectors"]:
        for token in vector.get("tokens", {}).get("tokens", ()):
            token.pop("before", None)
            token.pop("label", None)
