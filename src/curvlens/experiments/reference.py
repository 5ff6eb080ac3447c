"""Numbers that the experiments are to agree with, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from curvlens.experiments.experiment import Number


@dataclass(frozen=True)
class Reference:
    """A number from elsewhere."""

    name: str
    what: str
    value: float
    error: float
    source: str


@dataclass(frozen=True)
class Comparison:
    """A measured number beside it."""

    reference: Reference
    measured: Number

    @property
    def agrees(self) -> bool:
        """Whether the two are closer than their errors together."""
        apart = abs(self.measured.value - self.reference.value)
        return apart <= self.reference.error + self.measured.error + 1e-12


@cache
def references() -> tuple[tuple[Reference, ...], dict[str, str]]:
    """All of them, and what their sources are."""
    content = json.loads(files("curvlens.experiments").joinpath("reference.json").read_text(encoding="utf-8"))
    return tuple(Reference(**entry) for entry in content["numbers"]), dict(content["sources"])


def compared(numbers: Sequence[Number]) -> list[Comparison]:
    """What was measured beside what it is to agree with."""
    measured = {number.name: number for number in numbers}
    return [Comparison(each, measured[each.name]) for each in references()[0] if each.name in measured]
