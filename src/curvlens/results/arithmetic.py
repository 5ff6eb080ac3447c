"""Sums and multiples of estimates, with the error of the result.

Two estimates are independent if the seeds of both are known and they share none: random vectors depend on the seed
alone. Then errors add as roots of sums of squares, and degrees of freedom by Welch and Satterthwaite. Otherwise (one
seed, as for all blocks of one call, or an unknown one) the error of a sum or a difference is at most the sum of the
errors. This bound is returned: it is never too small, and for differences often too large. Exact terms add no error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.results.status import Status, worst

if TYPE_CHECKING:
    from curvlens.results.estimate import Estimate

SEEDS = "seeds"
"""The key for the seeds of the terms in the provenance of a sum."""
ROOTS = "roots"
"""The mark of an estimate whose passes were shared by all blocks of a call."""


def seeds(estimate: Estimate) -> frozenset[int] | None:
    """The seeds that an estimate depends on; empty if it is exact, None if they are not known."""
    if estimate.exact:
        return frozenset()
    about = estimate.provenance
    if SEEDS in about:
        return None if about[SEEDS] is None else frozenset(about[SEEDS])
    return frozenset([about["seed"]]) if "seed" in about else None


def shifted(estimate: Estimate, number: float) -> Estimate:
    """An estimate plus a known number."""
    if not number:
        return estimate
    status = _status(estimate, number)
    return replace(estimate, value=estimate.value + number, positive=False, fixed=0.0, status=status)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """A multiple of an estimate."""
    return replace(
        estimate,
        value=estimate.value * factor,
        stderr=estimate.stderr * abs(factor),
        positive=estimate.positive and factor != 0,
        fixed=estimate.fixed * factor**2,
        status=_status(estimate, factor),
    )


def _status(estimate: Estimate, number: float) -> Status:
    """The status after a sum or a product with a number: NaN or infinity makes the result unknown."""
    return estimate.status if math.isfinite(number) else worst([estimate.status, Status.HAS_GAPS])


def added(one: Estimate, other: Estimate) -> Estimate:
    """The sum of two estimates."""
    if one.value.shape != other.value.shape:
        raise CurvlensError(
            f"Shapes must match to add estimates; got {tuple(one.value.shape)} and {tuple(other.value.shape)}."
        )
    mine, theirs = seeds(one), seeds(other)
    known = mine is not None and theirs is not None
    independent = mine is not None and theirs is not None and not mine & theirs
    stderr = torch.hypot(one.stderr, other.stderr) if independent else one.stderr + other.stderr
    both = sorted((mine or frozenset()) | (theirs or frozenset())) if known else None
    about: dict[str, Any] = {"sum": True, SEEDS: both}
    # Traces of blocks of one call, by square roots: they come from the same passes.
    shared = bool(one.provenance.get(ROOTS) and other.provenance.get(ROOTS)) and one.samples == other.samples
    if shared and not independent:
        about[ROOTS] = True
    return type(one)(
        value=one.value + other.value,
        stderr=stderr,
        samples=one.samples if ROOTS in about else one.samples + other.samples,
        dof=_degrees(one, other) if independent else min(one.dof, other.dof),
        note="; ".join(dict.fromkeys(filter(None, (one.note, other.note)))),
        provenance=about,
        positive=one.positive and other.positive and bool((one.value * other.value > 0).all()),
        # a sum with one unmeasured term is unknown; it was still partly measured
        status=worst([one.status, other.status]) if one.measured == other.measured else Status.HAS_GAPS,
    )


def _degrees(one: Estimate, other: Estimate) -> float:
    """Degrees of freedom by Welch and Satterthwaite, the smallest over all entries. An exact term does not count."""
    if one.exact or other.exact:
        return min(one.dof, other.dof)

    def part(estimate: Estimate) -> Tensor:
        return estimate.stderr.square()

    total = (part(one) + part(other)).square()
    over = part(one).square() / one.dof + part(other).square() / other.dof
    least = (total / over.clamp(min=1e-300)).min() if total.numel() else torch.tensor(math.inf)
    found = float(least)
    return found if found >= 1 and math.isfinite(found) else min(one.dof, other.dof)
