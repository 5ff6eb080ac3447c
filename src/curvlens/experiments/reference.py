"""Numbers that the experiments are to agree with, and where they come from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from curvlens.experiments.experiment import Number

Outcome = Literal["agrees", "differs", "too few seeds to tell", "other width, not comparable"]
COARSE = 3.0
"""A number whose error is so many times the reference's agrees with too much to agree."""
USUAL = 1.959964
"""Standard errors in half of a 95 % interval."""


@dataclass(frozen=True)
class Reference:
    """A number from elsewhere."""

    name: str
    what: str
    value: float
    error: float
    """Half of a 95 % interval, of a range, or of the last digit; or a standard error."""
    source: str
    width: int | None = None
    """Of the networks that it is for; None where it is the same for all, as a power is."""
    standard: bool = False
    """Whether the error is a standard error."""

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        return USUAL * self.error if self.standard else self.error


@dataclass(frozen=True)
class Comparison:
    """A measured number beside it."""

    reference: Reference
    measured: Number

    @property
    def error(self) -> float:
        """Of the difference: both errors are 95 %, and independent, so that their squares add up."""
        return math.hypot(self.reference.half, self.measured.error)

    @property
    def apart(self) -> float:
        """How far apart the two are, in parts of what their errors allow."""
        difference = abs(self.measured.value - self.reference.value)
        return difference / self.error if self.error else math.inf if difference else 0.0

    @property
    def chance(self) -> float:
        """The share of pairs of samples with these errors that are at least so far apart."""
        return math.erfc(self.apart * USUAL / math.sqrt(2))

    @property
    def outcome(self) -> Outcome:
        """What the two say of each other."""
        if self.reference.width not in (None, self.measured.width):
            return "other width, not comparable"
        if self.apart > 1 + 1e-9:
            return "differs"
        return "too few seeds to tell" if self.measured.error > COARSE * self.reference.half else "agrees"


@cache
def _content() -> dict[str, Any]:
    text = files("curvlens.experiments").joinpath("reference.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@cache
def references() -> tuple[tuple[Reference, ...], dict[str, str]]:
    """All of them, and what their sources are."""
    return tuple(Reference(**entry) for entry in _content()["numbers"]), dict(_content()["sources"])


def differences(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence for each number that differs: how often chance alone would bring that about."""
    return [
        f"{each.reference.what}: if both ± are errors of samples, two samples are so far apart by chance in "
        f"{100 * each.chance:.2g} % of all cases."
        for each in comparisons
        if each.outcome == "differs"
    ]


def compared(numbers: Sequence[Number]) -> list[Comparison]:
    """What was measured beside what it is to agree with."""
    measured = {number.name: number for number in numbers}
    return [Comparison(each, measured[each.name]) for each in references()[0] if each.name in measured]
