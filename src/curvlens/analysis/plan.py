"""What an analysis will cost, stage by stage: the schedule is run without measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from curvlens.analysis.known import Known
from curvlens.analysis.schedule import STAGES, Outline, schedule
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


@dataclass(frozen=True)
class Plan:
    """Stages in their order, and what one gradient takes."""

    stages: tuple[Stage, ...]
    seconds_per_gradient: float
    budget: Budget | None
    memory: int
    """Bytes that the analysis is expected to take beside the model."""

    @property
    def gradients(self) -> float:
        """Of all stages."""
        return sum(stage.gradients for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return self.gradients * self.seconds_per_gradient

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Stage, what it will know, units, time: for a table."""
        return [
            (stage.name, stage.knows, str(stage.units), readable_time(stage.gradients * self.seconds_per_gradient))
            for stage in self.stages
        ]


class _Imagined(Known):
    """Knows what a schedule asks about, without having measured: each block in turn, until the share is spent."""

    def __init__(self, of: Outline) -> None:
        super().__init__(of.blocks)
        self._seen: dict[str, int] = {}

    def next_block(self, *, once: bool, close: float, least: float) -> str | None:
        todo = [name for name in self.blocks if name not in self._seen]
        if once and not todo:
            return None
        name = todo[0] if todo else min(self._seen, key=self._seen.__getitem__)
        if self._seen.get(name, 0) >= 3:  # most blocks are close by then
            return None
        self._seen[name] = self._seen.get(name, 0) + 1
        return name

    def rounds(self, name: str) -> int:
        return self._seen.get(name, 1) - 1

    def settled(self, letter: str, close: float, least: float) -> bool:
        return False

    def extremes(self) -> dict[str, int]:
        return {"top": 1, "bottom": 0}

    @property
    def vectors_key(self) -> str:
        return "imagined"

    def radius(self, vector: Any) -> float | None:
        return 1.0


def planned(of: Outline, seconds_per_gradient: float, budget: Budget | None, memory: int) -> Plan:
    """The plan of a schedule within its budget."""
    known = _Imagined(of)
    limit = of.budget if math.isfinite(of.budget) else ENDLESS
    units: dict[str, int] = {}
    costs: dict[str, float] = {}
    for step in schedule(of, known):
        if known.cost + step.cost > limit:
            continue
        known.cost += step.cost
        units[step.stage] = units.get(step.stage, 0) + 1
        costs[step.stage] = costs.get(step.stage, 0.0) + step.cost
    stages = tuple(Stage(name, STAGES[name], units[name], costs[name]) for name in STAGES if name in units)
    return Plan(stages, seconds_per_gradient, budget, memory)
