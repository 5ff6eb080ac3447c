"""Trace, norm and share of a term M of H with their errors, from the forms of the probes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlens.results import Estimate, Portion, Status

LEFT = 1e-4
"""The logarithm of a square is used only if at least this share of it is left without any one probe."""


@dataclass(frozen=True)
class Forms:
    """For one term M and k probes: every zᵢᵀ M zⱼ, and zᵢᵀ M H zᵢ."""

    pairs: Tensor
    """(k, k); NaN for probes of different groups."""
    with_hessian: Tensor
    """(k,)."""

    def __add__(self, other: Forms) -> Forms:
        return Forms(self.pairs + other.pairs, self.with_hessian + other.with_hessian)

    @staticmethod
    def joined(groups: list[Forms]) -> Forms:
        """The forms of several groups of probes; pairs across groups are NaN."""
        count = sum(len(group.pairs) for group in groups)
        pairs, start = torch.full((count, count), math.nan, dtype=torch.float64, device="cpu"), 0
        for group in groups:
            own = slice(start, start := start + len(group.pairs))
            pairs[own, own] = group.pairs
        return Forms(pairs, torch.cat([group.with_hessian for group in groups]))


def portion(forms: Forms, squares: Tensor) -> Portion:
    """The estimates for a term, with ‖Hz‖² of every probe."""
    return Portion(
        trace=mean(forms.pairs.diagonal()),
        frobenius=_norm(forms.pairs),
        share=_ratio(forms.with_hessian, squares),
    )


def mean(values: Tensor) -> Estimate:
    """The mean of independent numbers."""
    return _estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)), len(values))


def bounded(value: Tensor, error: Tensor, products: int, status: Status) -> Estimate:
    """A number whose error is a bound, not a spread; its degrees of freedom are infinite."""
    return Estimate(value, error, products, dof=1e9, status=status)


def root_mean(squares: Tensor) -> Estimate:
    """The root of the mean of independent numbers, ‖Hz‖²: the norm of H."""
    return _root(squares.mean(), (squares.sum() - squares) / (len(squares) - 1))


def _norm(pairs: Tensor) -> Estimate:
    """‖M‖_F, the root of the mean of (zᵢᵀ M zⱼ)² over pairs of different probes."""
    squares, count = pairs.square(), len(pairs)
    met = ~squares.isnan() & ~torch.eye(count, dtype=torch.bool)
    squares = squares.where(met, 0.0)
    total, number = squares.sum(), met.sum()
    without = (total - 2 * squares.sum(1)) / (number - 2 * met.sum(1)).clamp(min=1)
    return _root(total / number, without)


def _root(square: Tensor, without: Tensor) -> Estimate:
    """The root of an estimated square, with its error by the jackknife: the values without each probe in turn.

    The square has a skewed distribution: if it is too small, so is its spread. Its logarithm is less skewed. So the
    error is that of the logarithm times the root, and the interval is on the logarithm. If almost nothing is left
    without one probe, the error is that of the root itself.
    """
    count, value = len(without), math.sqrt(max(float(square), 0.0))
    some = bool((without > LEFT * square).all())
    varied = without.log() / 2 if some else without.clamp(min=0).sqrt()
    spread = math.sqrt((count - 1) / count * float((varied - varied.mean()).square().sum()))
    return replace(_estimate(value, value * spread if some else spread, count), positive=value > 0)


def _ratio(above: Tensor, below: Tensor) -> Estimate:
    """The ratio of two means of paired numbers, with its error to first order."""
    count = len(above)
    value = float(above.sum() / below.sum()) if float(below.sum()) else 0.0
    apart = (above - value * below).square().sum()
    spread = math.sqrt(float(apart) / (count - 1) / count) / max(float(below.mean()), 1e-300)
    return _estimate(value, spread, count)


def _estimate(value: float, stderr: float, count: int) -> Estimate:
    number = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (value, stderr)]
    return Estimate(number[0], number[1], count, dof=count - 1 if value or stderr else math.inf)
