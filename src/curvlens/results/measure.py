"""Probability measures on the line: each piece is a mass spread evenly over an interval, or an atom at a point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 512


@dataclass(frozen=True)
class Measure:
    """Masses on the intervals [lower, upper]; lower = upper is an atom."""

    lower: Tensor
    upper: Tensor
    mass: Tensor

    def cdf(self, x: Tensor, *, before: bool = False) -> Tensor:
        """F(x) = μ(−∞, x], or μ(−∞, x) with ``before``."""
        atoms = self.lower == self.upper
        points, order = self.lower[atoms].sort()
        total = torch.cat([points.new_zeros(1), self.mass[atoms][order].cumsum(0)])
        result = total[torch.searchsorted(points, x, right=not before)]
        lower, upper, mass = self.lower[~atoms], self.upper[~atoms], self.mass[~atoms]
        # Each ramp separately: differences of summed ramps would cancel next to a narrow, steep one.
        for part in (slice(i, i + CHUNK) for i in range(0, len(x), CHUNK) if len(lower)):
            ramps = ((x[part, None] - lower) / (upper - lower)).clamp(0, 1)
            result[part] += ramps @ mass
        return result

    def breaks(self) -> Tensor:
        """The points where the slope of the distribution function changes, ascending."""
        breaks: Tensor = torch.unique(torch.cat([self.lower, self.upper]))
        return breaks


def wasserstein(one: Measure, other: Measure) -> float:
    """∫ |F − G| dx, exactly: between breaks the difference is linear."""
    x = torch.unique(torch.cat([one.breaks(), other.breaks()]))
    left = one.cdf(x[:-1]) - other.cdf(x[:-1])
    right = one.cdf(x[1:], before=True) - other.cdf(x[1:], before=True)
    return float((line_area(left, right) * x.diff()).sum())


def line_area(left: Tensor, right: Tensor) -> Tensor:
    """∫₀¹ |straight line from left to right|."""
    sizes = left.abs() + right.abs()
    crossing = (left.square() + right.square()) / (2 * sizes).clamp(min=1e-300)
    return torch.where(left * right < 0, crossing, sizes / 2)
