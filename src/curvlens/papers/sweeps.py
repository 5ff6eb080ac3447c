"""Curves over repeats: what a sweep measured, its mean and band, and the power law where it is one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.calculus import exponents
from curvlens.calculus.exponents import PowerLaw
from curvlens.errors import CurvlensWarning
from curvlens.papers.experiment import Law, Number
from curvlens.papers.sizes import number
from curvlens.report.charts import Curve
from curvlens.study import Record

FEW = 5
"""Repeats below which a band shows their range, since an interval of their mean would say little."""


def grid(low: float, high: float, count: int) -> list[float]:
    """Places at equal distances of their logarithms, with few digits."""
    return [float(f"{x:.6g}") for x in np.geomspace(low, high, count)]


@dataclass(frozen=True)
class Sweep:
    """One quantity over a grid, repeated: rows are repeats, columns places on the grid."""

    x: tuple[float, ...]
    values: Tensor

    def curve(self, label: str, *, shares: bool = False, **style: Any) -> Curve:
        """The geometric mean, or the mean of shares, and its 95 % interval; of few repeats, their range."""
        values = self.values if shares else self.values.log()
        middle = values.mean(0)
        if len(values) < FEW:
            low, high = values.amin(0), values.amax(0)
        else:
            half = exponents.student(0.95, len(values) - 1) * values.std(0) / len(values) ** 0.5
            low, high = middle - half, middle + half
            low = low.clamp(min=0.0) if shares else low
        found = [line.tolist() if shares else line.exp().tolist() for line in (middle, low, high)]
        return Curve(label, self.x, found[0], found[1], found[2], **style)

    def middle(self) -> Tensor:
        """The geometric mean over the repeats, at each place."""
        return self.values.log().mean(0).exp()

    def within(self, low: float, high: float) -> Sweep:
        """A part of the grid."""
        keep = [i for i, x in enumerate(self.x) if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]
        return Sweep(tuple(self.x[i] for i in keep), self.values[:, keep])

    def finite(self) -> Sweep:
        """Without places where a repeat has no number."""
        keep = [i for i in range(len(self.x)) if bool((self.values[:, i].isfinite() & (self.values[:, i] > 0)).all())]
        return Sweep(tuple(self.x[i] for i in keep), self.values[:, keep])

    def at(self, places: Sequence[float]) -> Sweep:
        """Some places of the grid."""
        return Sweep(tuple(places), self.values[:, [self.x.index(place) for place in places]])

    def slopes(self) -> list[float]:
        """Between neighbouring places, of the mean of the logarithms."""
        x = torch.tensor(self.x, dtype=torch.float64).log()
        found: list[float] = (self.values.log().mean(0).diff() / x.diff()).tolist()
        return found

    def powers(self, window: tuple[float, float]) -> Tensor:
        """The slope in a window, of each repeat by itself."""
        usable = self.finite().within(*window)
        x = torch.tensor(usable.x, dtype=torch.float64).log()
        centred = x - x.mean()
        return usable.values.log() @ centred / centred.square().sum()

    @property
    def fits(self) -> bool:
        """Whether there are numbers enough for a power law."""
        return len(self.finite().x) >= 3 and len(self.values) > 0

    def law(self, window: tuple[float, float] | None = None, tolerance: float = 0.05) -> PowerLaw:
        """The power law, in a window or in the widest one where it is one."""
        usable = self.finite()
        within = None if window is None else (float(window[0]), float(window[1]))
        with warnings.catch_warnings():  # figures show the window, and how local slopes differ
            warnings.simplefilter("ignore", CurvlensWarning)
            return exponents.fit(list(usable.x), usable.values, window=within, tolerance=tolerance)

    def fitted(self, name: str, predicted: float | None) -> Law:
        """The power law in the widest window where it is one, beside a prediction."""
        law = self.law()
        return Law(name, predicted, law.slope, law.interval, law.window, max(law.local), min(law.local))

    def slope(self, name: str, window: tuple[float, float]) -> Number:
        """The slope in a window, with its interval, under the name of a reference number."""
        law = self.law(window)
        error = (law.interval[1] - law.interval[0]) / 2 if len(self.values) > 1 else math.inf
        return Number(name, law.slope, error, law.window)

    def local(self, label: str, **style: Any) -> Curve:
        """Slopes between neighbouring places, of the mean of the logarithms."""
        x = torch.tensor(self.x, dtype=torch.float64).log()
        return Curve(label, ((x[1:] + x[:-1]) / 2).exp().tolist(), self.slopes(), **style)


def where(records: Sequence[Record], **entries: Any) -> list[Record]:
    """The records that have these entries in their configurations."""
    return [record for record in records if entries.items() <= record.config.items()]


def sweep(records: Sequence[Record], over: str, *path: str | int) -> Sweep:
    """A number of records, found by keys and places in their results, over one entry of their configurations.

    Only repeats that have every place of the grid count.
    """
    found: dict[Any, dict[float, float]] = {}
    for record in records:
        value: Any = record.result
        for step in path:
            value = value[step]
        found.setdefault(record.config["seed"], {})[record.config[over]] = number(value)
    grid = sorted(set().union(*found.values())) if found else []
    whole = [[row[x] for x in grid] for row in found.values() if len(row) == len(grid)]
    return Sweep(tuple(grid), torch.tensor(whole, dtype=torch.float64).reshape(len(whole), len(grid)))


def farthest(slopes: Sequence[Number], power: float) -> Number:
    """The slope that is farthest from a power."""
    return max(slopes, key=lambda slope: abs(slope.value - power))


def mean(name: str, values: Sequence[float]) -> Number:
    """The mean over repeats, with half of its 95 % interval."""
    held = torch.tensor(values, dtype=torch.float64)
    if len(held) < 2:
        return Number(name, float(held.mean()), math.inf)
    spread = float(held.std())
    half = exponents.student(0.95, len(held) - 1) * spread / len(held) ** 0.5
    return Number(name, float(held.mean()), half, spread=spread)


def bars(label: str, found: Sequence[Number], colour: int) -> Curve:
    """A bar for each number, with its interval if there is one; shares are not below 0."""
    x, y = list(range(len(found))), [number.value for number in found]
    if any(math.isinf(number.error) for number in found):
        return Curve(label, x, y, colour=colour, style="bars")
    low = [max(0.0, number.value - number.error) for number in found]
    high = [number.value + number.error for number in found]
    return Curve(label, x, y, low, high, colour=colour, style="bars")
