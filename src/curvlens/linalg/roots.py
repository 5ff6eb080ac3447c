"""All diagonal blocks of a Gauss–Newton matrix from the same backward passes.

With a square root Λ^½ of the loss curvature and random signs z at the outputs, u = Jᵀ Λ^½ z has E u uᵀ = G. One
backward pass gives u, and then for every block b (`docs/explanation/math.md`, "All blocks of G at once")

- tr G_bb = E ‖u_b‖², with the variance of a Hutchinson estimate of that block alone,
- ‖G_bb‖²_F = E ⟨u_b, u'_b⟩² for independent u, u', from all pairs in a group of samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from scipy import special
from torch import Tensor
from torch.linalg import vector_norm

from curvlens._evaluation.graph import Parts
from curvlens.blocks import Blocks, By, Layout
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError, listing
from curvlens.interrupts import must_be_whole
from curvlens.linalg.basis import BasisPlace
from curvlens.linalg.basis import budget as room_for
from curvlens.linalg.counted import CountedOperator, warn
from curvlens.linalg.limits import BACKWARD, Spending
from curvlens.linalg.sampling import FEWEST, LEVEL, Quantity, SamplingPlan, degrees, sampling_plan
from curvlens.memory import readable
from curvlens.operators import Operator
from curvlens.operators.base import Progress
from curvlens.operators.curvature import GaussNewton
from curvlens.operators.footprint import footprint
from curvlens.results import ByBlock, Estimate, Status
from curvlens.study.budget import parse_budget

logger = logging.getLogger("curvlens")

Sample = tuple[Parts, float]
"""u by parameter, and c with E u uᵀ / c = G."""

NAMES: dict[Quantity, str] = {"trace": "trace", "square": "Frobenius norm", "diagonal": "diagonal"}


FEWEST_TO_CLOSE = 16
"""Samples before a block may be closed as accurate enough, which is final. With six, blocks of few outputs, whose
samples take few values, were sometimes closed with an error of zero and a wrong value."""

LARGEST_GROUP = 32
"""Samples in a group, whose pairs are used together. An interrupt loses at most one group."""


def has_roots(operator: Operator) -> bool:
    """Whether the operator has samples u with E u uᵀ equal to it."""
    return isinstance(operator, GaussNewton) and operator.has_roots


def all_blocks(
    quantity: Quantity,
    operator: Operator,
    samples: int | None = None,
    *,
    by: By = "block",
    rtol: float | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    memory: int | float | str | None = None,
    store: BasisPlace = "device",
    progress: Progress | None = None,
    budget: str | float | None = None,
) -> ByBlock:
    """Trace, or squared Frobenius norm, of all blocks. Samples stay on the device; ``store`` is ignored."""
    plan = sampling_plan(samples, rtol, max_samples)
    spending = Spending(parse_budget(budget), BACKWARD)
    if spending.budget is not None and spending.left() < 2:
        raise CurvlensError(
            f"budget={budget!r} is less than two samples of {operator!r}, which cost {2 * BACKWARD:.3g} gradients. "
            "Give a larger budget=."
        )
    timed = spending.budget is not None and spending.budget.seconds is not None
    asked = plan.samples
    if spending.budget is not None and not timed:
        plan = replace(plan, samples=int(min(asked, spending.left())))
    assert isinstance(operator, GaussNewton)
    products = CountedOperator(operator, symmetric=False, progress=progress)
    products.probes(seed)  # checks the seed
    products.total = plan.samples if plan.rtol is None else None
    allowed = room_for(memory, "device", operator.device)
    vector = operator.rows.size * operator.dtype.itemsize
    # The clock is read between groups.
    group = min(allowed // vector, plan.samples, FEWEST if timed else LARGEST_GROUP)
    if group < 2:
        raise CurvlensError(
            f"Two samples of {operator.rows.size} numbers need {readable(2 * vector)}; {readable(allowed)} are "
            "allowed. Raise memory=."
        )
    held = footprint(operator)
    together = 1 if quantity == "trace" else group
    peak = held.kept + held.work + together * vector
    logger.info("%s by %s: %d samples, %s at the peak", NAMES[quantity], by, plan.samples, readable(peak))
    found = _Found(quantity, operator.rows.blocks.by(by))
    status, note = Status.SAMPLED if plan.rtol is None else Status.CONVERGED, ""
    try:
        for seeds in _groups(plan, seed, group):
            # Blocks that are accurate enough are left out, which saves the backward pass to their parameters.
            rows = operator.rows if found.open is found.blocks else Layout(found.open.order)
            found.add(operator._block(rows, rows).roots(seeds, _in_samples(products, len(seeds))))
            products.tick(found.sampled - products.count)
            spending.steps = found.sampled
            if plan.rtol is not None and found.sampled >= FEWEST_TO_CLOSE:
                found.close(plan.rtol)
                if not found.open:
                    break
            if timed and spending.left() < group:
                if found.sampled < asked:
                    status, note = Status.STOPPED_AT_BUDGET, f"budget: {found.sampled} of {asked} samples"
                break
        else:
            if plan.samples < asked:
                status, note = Status.STOPPED_AT_BUDGET, f"budget: {plan.samples} of {asked} samples"
            elif plan.rtol is not None:
                status = Status.ACCURACY_NOT_REACHED
                note = f"rtol={plan.rtol:g} not reached after {plan.samples} samples"
                warn(
                    f"The {NAMES[quantity]} by {by}: {note} for {listing(found.open)}. `stderr` shows the accuracy "
                    "reached."
                )
    except KeyboardInterrupt:
        if must_be_whole() or not found.sampled:
            raise
        status, note = Status.INTERRUPTED, f"interrupted after {found.sampled} samples"
        warn(f"The {NAMES[quantity]} by {by} was {note}; the errors are for the samples that were done.")
    provenance = products.provenance(quantity=quantity, seed=seed, sampled=found.sampled, by=by, roots=True)
    estimates = found.estimates(status, note, provenance)
    said = [f"{spending} spent."] if spending.budget is not None else []
    return ByBlock(estimates, NAMES[quantity], by, " ".join([*said, *([note] if note else [])]), status)


class _Found:
    """The results for each block so far, and the blocks that need more samples."""

    def __init__(self, quantity: Quantity, blocks: Blocks) -> None:
        self.quantity, self.blocks, self.open = quantity, blocks, blocks
        self.sampled = 0
        self._groups: list[Tensor] = []  # for the open blocks: (blocks, g) or (blocks, g, g)
        self._closed: dict[str, tuple[Tensor, Tensor, float, int]] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Add a group of samples."""
        forms = _squares(samples, self.open) if self.quantity == "trace" else _grams(samples, self.open)
        self._groups.append(forms)
        self.sampled += forms.shape[1]

    def close(self, rtol: float) -> None:
        """Close blocks that are accurate enough, and blocks that are only rounding compared with the others."""
        value, stderr, dof = _statistics(self.quantity, self._groups)
        t = torch.from_numpy(special.stdtrit(dof.numpy(), (1 + LEVEL) / 2))
        factor = 2.0 if self.quantity == "square" else 1.0  # a square has twice the relative error of its root
        largest = max([float(value.max()), *(float(v) for v, *_ in self._closed.values())])
        # On the logarithm, the half-width of an interval is value · sinh(t stderr/value).
        near = (stderr * t <= factor * math.asinh(rtol) * value) | (value <= 1e-12 * largest)
        for i, name in enumerate(self.open):
            if near[i]:
                self._closed[name] = (value[i], stderr[i], float(dof[i]), self.sampled)
        if near.any():
            self._groups = [group[~near] for group in self._groups]
            self.open = self.open.only([name for name in self.open if name not in self._closed])

    def estimates(self, status: Status, note: str, provenance: dict[str, Any]) -> dict[str, Estimate]:
        """An estimate for each block. ``status`` and ``note`` are for the blocks that are still open."""
        close = Status.CONVERGED
        done = {
            name: Estimate(value, stderr, samples, dof, "", provenance, positive=True, status=close)
            for name, (value, stderr, dof, samples) in self._closed.items()
        }
        if self.open:
            value, stderr, dof = _statistics(self.quantity, self._groups)
            for i, name in enumerate(self.open):
                about = (self.sampled, float(dof[i]), note, provenance)
                done[name] = Estimate(value[i], stderr[i], *about, positive=True, status=status)
        return {name: done[name] for name in self.blocks}


def _groups(plan: SamplingPlan, seed: int, group: int) -> Iterator[list[int]]:
    """Seeds for one group of samples after another; no seed is used twice."""
    done = 0
    # With rtol, groups grow with the number of samples: few checks, and few samples more than needed.
    size = min(group, plan.samples if plan.rtol is None else FEWEST_TO_CLOSE)
    while done < plan.samples:
        size = min(size, plan.samples - done)
        if plan.samples - done - size == 1:  # a single sample has no pair
            size -= 1 if size > 2 else -1
        yield [seed * 1_000_003 + done + i for i in range(size)]
        done += size
        if plan.rtol is not None:
            size = min(group, max(FEWEST, math.ceil(0.3 * done)))


def _squares(samples: Iterable[Sample], blocks: Blocks) -> Tensor:
    """‖u_b‖² / c for every block and sample, (blocks, g)."""
    parts = [(i, part) for i, block in enumerate(blocks.values()) for part in block.parts]
    columns = [
        torch.stack([vector_norm(_taken(u, part), dtype=torch.float64) for _, part in parts]).square() / c
        for u, c in samples
    ]
    squares = torch.stack(columns, dim=1).cpu()
    place = torch.tensor([i for i, _ in parts])
    return squares.new_zeros(len(blocks), squares.shape[1]).index_add_(0, place, squares)


def _grams(samples: Iterable[Sample], blocks: Blocks) -> Tensor:
    """⟨u_b, u'_b⟩ / c for every block and pair of samples, (blocks, g, g)."""
    group = list(samples)
    scale = torch.tensor([c for _, c in group], dtype=torch.float64).rsqrt()

    def gram(part: Part) -> Tensor:
        U = torch.stack([_taken(u, part).reshape(-1) for u, _ in group]).double()
        return U @ U.T

    grams = torch.stack([torch.stack([gram(part) for part in block.parts]).sum(0) for block in blocks.values()])
    return grams.cpu() * scale[:, None] * scale


def _taken(u: Parts, part: Part) -> Tensor:
    """A part of a parameter; a view if the part is the whole parameter."""
    values = u[part.parameter]
    return values if part.whole else part.take(values.reshape(-1))


def _in_samples(products: CountedOperator, size: int) -> Progress:
    """Report backward passes over the pieces of the data as samples."""
    start = products.count

    def told(done: int, total: int | None) -> None:
        products.tick(start + (size * done // total if total else 0) - products.count)

    return told


def _statistics(quantity: Quantity, groups: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Value and standard error for each block, and the degrees of freedom."""
    count = sum(g.shape[1] for g in groups)
    if quantity == "trace":
        x = torch.cat(groups, dim=1)
        return x.mean(1), x.std(1) / math.sqrt(count), degrees(count, x.mean(1), x.var(1))
    pairs = sum(g.shape[1] * (g.shape[1] - 1) // 2 for g in groups)
    # The contribution of every sample to the sum over pairs, and the number of its pairs.
    own = torch.cat([g.square().sum(2) - g.diagonal(dim1=1, dim2=2).square() for g in groups], dim=1)
    partners = torch.cat([torch.full((g.shape[1],), g.shape[1] - 1, dtype=torch.float64) for g in groups])
    total = own.sum(1, keepdim=True) / 2
    value = total[:, 0] / pairs
    if pairs <= int(partners.max()):
        return value, torch.full_like(value, math.inf), torch.ones_like(value)
    without = (total - own) / (pairs - partners)
    spread = (without - without.mean(1, keepdim=True)).square().sum(1)
    # Products of pairs are skewed: with a third of the degrees of freedom, intervals on the logarithm are valid.
    return value, (spread * (count - 1) / count).sqrt(), torch.full_like(value, max(count // 3, 1))
