"""What eigenvalues and densities say together: the spectral gap, condition numbers, atoms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from curvlens.analysis.estimates import enclosed
from curvlens.results import Density
from curvlens.study import Record

SHARES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Parts of the spectrum whose condition number may be given; the largest that the errors support is."""
SPREAD = 6.0
"""A condition number is given if the ends of its interval are within this factor."""
WIDTH = 1e-5
"""Of the largest |λ|: eigenvalues this close count as equal."""
SURE = 3.0
"""Standard errors by which the share of an atom is above a single eigenvalue."""


def gap(record: Record) -> dict[str, Any] | None:
    """λ₁ − λ₂ with the bounds of both; None where the second largest was not looked for, or one has not converged."""
    if record.config["k"] < 2:
        return None
    (second, top), residuals = record.result["values"][-2:], record.result["residuals"][-2:]
    if not all(record.result["converged"][-2:]):
        return None
    found = enclosed(top - second, sum(residuals))
    return found | {"low": max(found["low"], 0.0), "second": second}


def condition(density: Density, top: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """λ_max over the m-th largest eigenvalue: the condition number on the span of the m largest eigenvectors.

    The m-th largest is a quantile of the density; its interval is where the 95 % band of the density crosses it.
    """
    largest = float(density.nodes.max())
    low_top, high_top = (top["low"], top["high"]) if top is not None else (largest, largest)
    if low_top <= 0:
        return None
    value_top = top["value"] if top is not None else largest
    x = _points(density)
    low, high = density.band(x)
    curves = density.cdf(x), high, low
    for share in SHARES:
        m = round(share * density.n)
        if m < 2:
            return None
        level = 1 - (m - 0.5) / density.n
        value, least, most = (_crossing(x, curve, level) for curve in curves)
        if least > 0 and value > 0 and most <= SPREAD * least:
            ends = {"low": max(low_top / most, 1.0), "high": max(high_top / least, 1.0)}
            return {"value": max(value_top / value, 1.0), **ends, "share": share, "directions": m, "exact": False}
    return None


def _points(density: Density) -> torch.Tensor:
    """Where a density is looked at: its nodes and, logarithmically, all sizes down to 1e-6 of the largest."""
    largest = float(density.nodes.abs().max()) or 1.0
    sizes = torch.logspace(math.log10(largest) - 6, math.log10(largest), 2000, dtype=torch.float64) * (1 + 1e-9)
    ends = torch.stack([density.nodes.min(), density.nodes.max()]).double()
    return torch.cat([-sizes, sizes, density.nodes.double(), torch.zeros(1, dtype=torch.float64), ends]).sort().values


def _crossing(x: torch.Tensor, curve: torch.Tensor, level: float) -> float:
    """The first x at which an ascending curve is at least ``level``; infinite if it never is."""
    above = (curve >= level).nonzero()
    return float(x[above[0, 0]]) if len(above) else math.inf


def atoms(density: Density) -> list[dict[str, Any]]:
    """Values that several eigenvalues share, to `WIDTH` of the largest, with the least share that is there.

    The share is that of the nodes which are eigenvalues; others may hide more of it, so it is a lower bound, up to its
    standard error. A single isolated eigenvalue is no atom: the share must be above 1/n by three standard errors.
    """
    width, found = WIDTH * float(density.nodes.abs().max()), []
    for value, mass in _merged(density.atoms(), width):
        share, stderr = min(mass, 1.0), 0.0
        if not density.exact:
            # The squared length of a random direction in a space of m of n dimensions.
            stderr = math.sqrt(2 * share * (1 - share) / ((density.n + 2) * density.probes))
        if share - SURE * stderr > (1 + 1e-9) / density.n:
            place = 0.0 if abs(value) <= width else value
            found.append({"at": place, "value": share, "stderr": stderr, "exact": density.exact})
    return found


def _merged(pairs: list[tuple[float, float]], width: float) -> list[tuple[float, float]]:
    """Values within ``width`` of the first of them as one, at their mean."""
    groups: list[list[tuple[float, float]]] = []
    for value, mass in pairs:
        if groups and value - groups[-1][0][0] <= width:
            groups[-1].append((value, mass))
        else:
            groups.append([(value, mass)])
    masses = [math.fsum(mass for _, mass in group) for group in groups]
    return [
        (math.fsum(value * mass for value, mass in group) / (total or 1.0), total)
        for group, total in zip(groups, masses, strict=True)
    ]
