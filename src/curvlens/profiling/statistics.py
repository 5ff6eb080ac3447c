"""From what probes say of a term M of H to its trace, norm and share, each with its error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.results import Estimate, Portion


@dataclass(frozen=True)
class Forms:
    """Of one term M and k probes: every zᵢᵀ M zⱼ, and zᵢᵀ M H zᵢ."""

    pairs: Tensor
    """(k, k); NaN where two probes did not meet."""
    with_hessian: Tensor
    """(k,)."""

    def __add__(self, other: Forms) -> Forms:
        return Forms(self.pairs + other.pairs, self.with_hessian + other.with_hessian)

    @staticmethod
    def joined(groups: list[Forms]) -> Forms:
        """The forms of several groups of probes, which did not meet."""
        count = sum(len(group.pairs) for group in groups)
        pairs, start = torch.full((count, count), math.nan, dtype=torch.float64, device="cpu"), 0
        for group in groups:
            own = slice(start, start := start + len(group.pairs))
            pairs[own, own] = group.pairs
        return Forms(pairs, torch.cat([group.with_hessian for group in groups]))


def portion(forms: Forms, squares: Tensor) -> Portion:
    """What is known of a term, with ‖Hz‖² of every probe."""
    return Portion(
        trace=mean(forms.pairs.diagonal()),
        frobenius=_norm(forms.pairs),
        share=_ratio(forms.with_hessian, squares),
    )


def mean(values: Tensor) -> Estimate:
    """The mean of independent numbers."""
    return _estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)), len(values))


def bounded(value: Tensor, error: Tensor, products: int) -> Estimate:
    """A number whose error is a bound, not a spread: as if of very many degrees of freedom."""
    return Estimate(value, error, products, dof=1e9)


def root(square: Estimate) -> Estimate:
    """The root of a mean; the error to first order."""
    value = math.sqrt(max(float(square.value), 0.0))
    return _estimate(value, float(square.stderr) / (2 * value) if value else 0.0, square.samples)


def _norm(pairs: Tensor) -> Estimate:
    """‖M‖_F, the root of the mean of (zᵢᵀ M zⱼ)² over pairs of different probes; the error by the jackknife."""
    count = len(pairs)
    squares = pairs.square()
    met = ~squares.isnan() & ~torch.eye(count, dtype=torch.bool)
    squares = squares.where(met, 0.0)
    total, number = squares.sum(), met.sum()
    without = (total - 2 * squares.sum(1)) / (number - 2 * met.sum(1)).clamp(min=1)
    roots = without.clamp(min=0).sqrt()
    spread = math.sqrt((count - 1) / count * float((roots - roots.mean()).square().sum()))
    return _estimate(math.sqrt(float(total / number)), spread, count)


def _ratio(above: Tensor, below: Tensor) -> Estimate:
    """The ratio of two means of numbers that come in pairs; the error to first order."""
    count = len(above)
    value = float(above.sum() / below.sum()) if float(below.sum()) else 0.0
    apart = (above - value * below).square().sum()
    spread = math.sqrt(float(apart) / (count - 1) / count) / max(float(below.mean()), 1e-300)
    return _estimate(value, spread, count)


def _estimate(value: float, stderr: float, count: int) -> Estimate:
    number = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (value, stderr)]
    return Estimate(number[0], number[1], count, dof=count - 1 if value or stderr else math.inf)
