"""Where on a grid something is true: the widest range of neighbouring places, and power laws in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from curvlens.papers.sweeps import Sweep
from curvlens.papers.verdicts import Finding, judged

LOCAL = 0.1
"""How far a local slope may be from a power that a curve is said to follow."""
DECADE = 10.0
"""The narrowest range that is called one: its upper end over its lower end."""


@dataclass(frozen=True)
class Range:
    """Places between which something is true."""

    low: float
    high: float
    first: bool
    """It begins where the grid does."""
    last: bool
    """It ends where the grid does."""

    @property
    def whole(self) -> bool:
        """The whole grid."""
        return self.first and self.last

    def said(self, name: str = "σ") -> str:
        """As a condition.

        >>> Range(0.01, 0.5, True, False).said(), Range(2.0, 9.0, False, False).said("t")
        ('σ ≤ 0.5', 't from 2 to 9')
        """
        if self.first != self.last:
            return f"{name} ≤ {self.high:.2g}" if self.first else f"{name} ≥ {self.low:.2g}"
        return f"{name} from {self.low:.2g} to {self.high:.2g}"


def widest(x: Sequence[float], steps: Sequence[bool], at_least: float = DECADE) -> Range | None:
    """The widest run of true steps between neighbouring places; None if it is narrower than `at_least`."""
    best: Range | None = None
    start = 0
    for place in range(1, len(x)):
        if not steps[place - 1]:
            start = place
        elif best is None or x[place] / x[start] > best.high / best.low:
            best = Range(x[start], x[place], start == 0, place == len(x) - 1)
    wide = best is not None and (best.whole or best.high / best.low >= at_least * (1 - 1e-6))
    return best if wide else None


def following(
    curves: Iterable[tuple[Sweep, float]], tolerance: float = LOCAL, at_least: float = DECADE
) -> Range | None:
    """The widest range in which every local slope of all curves, on one grid, is the power that is said of it.

    Places where a number is missing are left out.
    """
    pairs = list(curves)
    keep = set.intersection(*(set(curve.finite().x) for curve, _ in pairs))
    if len(keep) < 2:
        return None
    steps, x = [True] * (len(keep) - 1), sorted(keep)
    for curve, power in pairs:
        slopes = curve.at(x).slopes()
        steps = [good and abs(slope - power) <= tolerance for good, slope in zip(steps, slopes, strict=True)]
    return widest(x, steps, at_least)


def steady(curve: Sweep, sign: int = 1, at_least: float = DECADE) -> Range | None:
    """The widest range in which the mean rises at every step, or falls with the sign −1."""
    usable = curve.finite()
    return widest(usable.x, [sign * slope > 0 for slope in usable.slopes()], at_least)


def told(found: Range | None, name: str = "σ") -> str:
    """Where something is true, in the middle of a sentence."""
    return f"{name} from {found.low:.2g} to {found.high:.2g}" if found else f"no decade of {name}"


def judged_range(claim: str, measured: str, found: Range | None, name: str = "σ") -> Finding:
    """What is claimed of a whole grid, and true in a range of it."""
    return judged(
        claim, measured, holds=found is not None and found.whole, when=found.said(name) if found is not None else ""
    )


def extent(curve: Sweep) -> str:
    """The smallest and the largest local slope: ``4.2 to 5.1``."""
    slopes = curve.finite().slopes()
    return f"{min(slopes):.2f} to {max(slopes):.2f}" if slopes else "no numbers"
