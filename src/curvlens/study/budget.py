"""A budget: a time, or a number of gradients. Every ``budget=`` of curvlens uses this parser."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from curvlens.errors import CurvlensError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"(\d+\.?\d*(?:e\d+)?)\s*(s|m|h|gradients?)(?:ec(?:ond)?s?|in(?:ute)?s?|ours?|rs?)?")
_NUMBER = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d+)?|[-+]?nan|[-+]?inf)\s*(\D*)", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A number of seconds, or a number of gradients; the other is None."""

    seconds: float | None = None
    gradients: float | None = None
    text: str = ""
    """The text that the user gave, for messages."""

    def __post_init__(self) -> None:
        given = [amount for amount in (self.seconds, self.gradients) if amount is not None]
        if len(given) != 1:
            raise CurvlensError("A budget is a time or a cost. Give one: Budget(seconds=60) or Budget(gradients=200).")
        if not 0 < given[0] < math.inf:
            raise _error(given[0], "is not a finite number above zero" if given[0] > 0 else "is not above zero")

    def __str__(self) -> str:
        return self.text or (f"{self.seconds:g}s" if self.seconds is not None else f"{self.gradients:g} gradients")


def parse_budget(budget: str | float | Budget | None) -> Budget | None:
    """``"2m"``, ``"90s"``, ``"1h"``, a number of seconds, or ``"200 gradients"``; None means no limit.

    >>> parse_budget("2m").seconds, parse_budget("200 gradients").gradients
    (120.0, 200.0)
    """
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise _error(budget, f"has the type {type(budget).__name__}")
    if not isinstance(budget, str):
        if not 0 < budget < math.inf:
            raise _error(budget, "is not a finite number above zero")
        return Budget(seconds=float(budget), text=f"{budget:g}s")
    text = budget.strip()
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise _error(budget, _why(text))
    if not 0 < float(match[1]) * 3600 < math.inf:
        raise _error(budget, "is not a finite number above zero" if float(match[1]) else "is not above zero")
    if match[2].startswith("gradient"):
        return Budget(gradients=float(match[1]), text=text)
    return Budget(seconds=float(match[1]) * _SECONDS[match[2]], text=text)


def readable_time(seconds: float) -> str:
    """A time for people.

    >>> readable_time(8.2), readable_time(130), readable_time(9000)
    ('8 s', '2.2 min', '2.5 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"


def _why(text: str) -> str:
    """What is wrong with a text that is no budget."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return "is not an amount with a unit"
    if text.lower().lstrip("+-").startswith(("nan", "inf")) or text.startswith("-"):
        return "is not a finite number above zero"
    return f"has the unknown unit {match[2].strip()!r}" if match[2].strip() else "has no unit"


def _error(budget: object, why: str) -> CurvlensError:
    return CurvlensError(
        f"budget={budget!r:.60} {why}. Give a time, as budget='90s', '2m' or '1h', or a cost, as '200 gradients'."
    )
