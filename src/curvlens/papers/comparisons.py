"""Compare two numbers over repeats: which is larger, or undecided."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.papers.experiment import Number
from curvlens.papers.sweeps import mean

DOMINATES = 2.0
"""How many times as large a part must be to dominate another."""
ROUNDING = 1e-10
"""Relative to the number it is compared with; anything below counts as zero, up to rounding."""


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of a ratio over repeats, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """The number of repeats. A single repeat has no interval and decides nothing."""

    def above(self, bound: float = 1.0) -> bool | None:
        """Whether it is larger; None if the interval does not tell."""
        return True if self.low > bound else False if self.high <= bound else None

    def below(self, bound: float = 1.0) -> bool | None:
        """Whether it is smaller; None if the interval does not tell."""
        return True if self.high < bound else False if self.low >= bound else None

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "no number"
        text = f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"
        return text if self.above() is not None else f"{text}, which {seeds(self.count)} cannot tell from 1"


def seeds(count: int) -> str:
    """A number of seeds, in words.

    >>> seeds(1), seeds(3)
    ('1 seed', '3 seeds')
    """
    return f"{count} seed{'' if count == 1 else 's'}"


def undecided(holds: bool | None, count: int) -> str:
    """A sentence if the repeats are too few to decide, otherwise an empty text."""
    return f" This cannot be told with {seeds(count)}." if holds is None else ""


def ratio(above: Tensor, below: Tensor) -> Ratio:
    """Of two numbers a repeat, in pairs; repeats where one of them is missing are left out."""
    logs = (above / below).log()
    found = mean("", logs[logs.isfinite()].tolist())
    count = int(logs.isfinite().sum())
    if not count:
        return Ratio(math.nan, 0.0, math.inf, 0)
    half = found.error if count > 1 else math.inf
    return Ratio(math.exp(found.value), math.exp(found.value - half), _exp(found.value + half), count)


def _exp(power: float) -> float:
    return math.exp(power) if power < 700 else math.inf


def between(number: Number, low: float, high: float) -> bool | None:
    """Whether a mean with its interval lies in a range; None where the interval is partly in it."""
    least, most = number.value - number.error, number.value + number.error
    if low <= least and most <= high:
        return True
    return False if most < low or least > high else None


def largest(values: Tensor) -> float:
    """Of the numbers that are there; NaN if none is."""
    finite = values[torch.isfinite(values)]
    return float(finite.max()) if finite.numel() else math.nan
