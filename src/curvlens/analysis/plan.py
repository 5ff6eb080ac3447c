"""What an analysis will cost, stage by stage: the schedule is run without measuring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from curvlens.analysis.clock import Clock
from curvlens.analysis.known import Known
from curvlens.analysis.schedule import STAGES, Outline, Step, schedule
from curvlens.analysis.writing import Writing
from curvlens.study import Budget
from curvlens.study.budget import readable_time

ENDLESS = 2000.0
"""Gradients up to which an analysis without a budget is planned."""


@dataclass(frozen=True)
class Stage:
    """A stage of a plan."""

    name: str
    knows: str
    units: int
    gradients: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Stages in their order, and what one gradient takes."""

    stages: tuple[Stage, ...]
    seconds_per_gradient: float
    budget: Budget | None
    memory: int
    """Bytes that the analysis is expected to take beside the model, at its peak."""
    writing: float = 0.0
    """Seconds for the page and its figures."""

    @property
    def gradients(self) -> float:
        """Of all stages."""
        return sum(stage.gradients for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Of all stages, and of the page."""
        return sum(stage.seconds for stage in self.stages) + self.writing

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Stage, what it will know, units, time: for a table."""
        return [(stage.name, stage.knows, str(stage.units), readable_time(stage.seconds)) for stage in self.stages]


class Imagined(Known):
    """Knows what a schedule asks about, without having measured: each block in turn, until the share is spent."""

    def __init__(self, of: Outline) -> None:
        super().__init__(of.blocks)
        self._seen: dict[str, int] = {}

    def next_block(self, *, once: bool, close: float, least: float) -> str | None:
        """Each block in turn, three times."""
        todo = [name for name in self.blocks if name not in self._seen]
        if once and not todo:
            return None
        name = todo[0] if todo else min(self._seen, key=self._seen.__getitem__)
        if self._seen.get(name, 0) >= 3:  # most blocks are close by then
            return None
        self._seen[name] = self._seen.get(name, 0) + 1
        return name

    def rounds(self, name: str) -> int:
        """As if each had been measured."""
        return self._seen.get(name, 1) - 1

    def settled(self, letter: str, close: float, least: float) -> bool:
        """Never."""
        return False

    def extremes(self) -> dict[str, int]:
        """Both."""
        return {"top": 1, "bottom": 0}

    @property
    def vectors_key(self) -> str:
        """A key of no record."""
        return "imagined"

    def radius(self, vector: Any) -> float | None:
        """Any."""
        return 1.0


def planned(of: Outline, clock: Clock, budget: Budget | None, room: Callable[[Step], int], writing: Writing) -> Plan:
    """The plan of a schedule within its budget; ``room`` gives the bytes of a step."""
    known = Imagined(of)
    limit = of.budget if math.isfinite(of.budget) else ENDLESS
    in_time = budget is not None and budget.seconds is not None
    taken: dict[str, list[tuple[Step, float]]] = {}
    memory = 0
    for step in schedule(of, known):
        seconds = clock.seconds(step)
        cost = seconds / clock.gradient if in_time else step.cost
        if known.cost + cost > limit:
            known.skip(step.unit)
            continue
        known.cost += cost
        memory = max(memory, room(step))
        taken.setdefault(step.stage, []).append((step, seconds))
    stages = tuple(
        Stage(name, STAGES[name], len(found), sum(step.cost for step, _ in found), sum(seconds for _, seconds in found))
        for name, found in ((name, taken[name]) for name in STAGES if name in taken)
    )
    return Plan(stages, clock.gradient, budget, memory + writing.memory, writing.seconds)
