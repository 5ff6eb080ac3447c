"""Reference numbers for the experiments, and their sources."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from curvlens.calculus import exponents
from curvlens.papers.experiment import Number

Outcome = Literal[
    "agrees",
    "within the reference's sampling error",
    "differs",
    "too few seeds to tell",
    "other width, not comparable",
]
COARSE = 3.0
"""If our error is more than this many times the reference's, there are too few seeds to tell."""
USUAL = 1.959964
"""Standard errors in half of a 95 % interval."""


@dataclass(frozen=True)
class Reference:
    """A number from another source."""

    name: str
    what: str
    value: float
    error: float
    """Half of a 95 % interval, of a range, or of the last digit; or a standard error."""
    source: str
    width: int | None = None
    """Width of its networks; None if it is the same for all widths, such as a power."""
    standard: bool = False
    """Whether the error is a standard error."""
    networks: int | None = None
    """The number of networks it is a mean over, if known."""

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        return USUAL * self.error if self.standard else self.error


@dataclass(frozen=True)
class Comparison:
    """A reference and the measured number."""

    reference: Reference
    measured: Number

    @property
    def error(self) -> float:
        """The error of the difference: both errors are 95 % and independent, so their squares add."""
        return math.hypot(self.reference.half, self.measured.error)

    @property
    def apart(self) -> float:
        """The difference, divided by its error."""
        difference = abs(self.measured.value - self.reference.value)
        return difference / self.error if self.error else math.inf if difference else 0.0

    @property
    def sampling(self) -> float | None:
        """Half of the 95 % interval of a mean over as many networks as the reference has, with the scatter of ours.

        The ± of a small sample is itself uncertain; the scatter of many networks is not.
        """
        if self.reference.networks is None or self.measured.spread is None:
            return None
        n = self.reference.networks
        return exponents.student(0.95, n - 1) * self.measured.spread / math.sqrt(n)

    @property
    def sampled(self) -> bool:
        """Whether the sampling errors of both explain the difference, beyond the ± that the reference prints."""
        if self.sampling is None:
            return False
        error = math.hypot(max(self.reference.half, self.sampling), self.measured.error)
        return abs(self.measured.value - self.reference.value) <= error

    @property
    def chance(self) -> float:
        """The share of pairs of samples with these errors that are at least so far apart."""
        return math.erfc(self.apart * USUAL / math.sqrt(2))

    @property
    def outcome(self) -> Outcome:
        """The result of the comparison, in words."""
        if self.reference.width not in (None, self.measured.width):
            return "other width, not comparable"
        if self.apart > 1 + 1e-9:
            return "within the reference's sampling error" if self.sampled else "differs"
        return "too few seeds to tell" if self.measured.error > COARSE * self.reference.half else "agrees"


@cache
def _content() -> dict[str, Any]:
    text = files("curvlens.papers").joinpath("reference.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@cache
def references() -> tuple[tuple[Reference, ...], dict[str, str]]:
    """All references, and their sources by name."""
    return tuple(Reference(**entry) for entry in _content()["numbers"]), dict(_content()["sources"])


def explanations(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence for each number that agrees within the sampling error of the reference: how large that error is."""
    return [
        f"{each.reference.what}: the reference is a mean over about {each.reference.networks} networks, which scatter "
        f"by {each.measured.spread:.2f}, so such means have ± {each.sampling:.3f}; with our ± "
        f"{each.measured.error:.3f} the two may be {math.hypot(each.sampling, each.measured.error):.3f} apart, and are "
        f"{abs(each.measured.value - each.reference.value):.3f}."
        for each in comparisons
        if each.outcome == "within the reference's sampling error" and each.sampling is not None
    ]


def differences(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence for each number that differs: how often this happens by chance."""
    return [
        f"{each.reference.what}: if both ± are sampling errors, two samples are this far apart by chance in "
        f"{100 * each.chance:.2g} % of all cases."
        for each in comparisons
        if each.outcome == "differs"
    ]


def compared(numbers: Sequence[Number]) -> list[Comparison]:
    """Each reference that was measured, with its number."""
    measured = {number.name: number for number in numbers}
    return [Comparison(each, measured[each.name]) for each in references()[0] if each.name in measured]
