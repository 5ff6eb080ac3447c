"""One estimate for each block of any operator; the largest blocks come first.

With a budget, a cheap round comes first, so that every block has a value even if the budget ends early. For traces
these are a few products of the whole operator, E z_b ∘ (A z)_b, which all blocks share. For norms, which need products
with each block, they are a few of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from curvlens.blocks import By
from curvlens.errors import CurvlensError, listing
from curvlens.interrupts import must_be_whole
from curvlens.linalg.counted import CountedOperator, warn
from curvlens.linalg.limits import Spending, gradients
from curvlens.linalg.sampling import FEWEST, Options, Quantity, SamplingPlan, estimate, sampling_plan
from curvlens.operators import Operator
from curvlens.operators.base import Progress
from curvlens.results import ByBlock, Estimate, Status
from curvlens.results.estimate import not_measured
from curvlens.study.budget import parse_budget

FIRST = 4
"""Products with each block in the first round of norms."""


def each_block(
    quantity: Quantity, operator: Operator, samples: int | None, by: By, budget: str | float | None, options: Options
) -> ByBlock:
    """An estimate for every block. A block that an interrupt or the budget left out is `not_measured`."""
    plan = sampling_plan(samples, options.get("rtol"), options.get("max_samples"))
    spending = Spending(parse_budget(budget), gradients(operator))
    blocks = operator.blocks(by)
    largest_first = dict(sorted(blocks.items(), key=lambda item: -item[1].shape[0]))
    work = _Work(quantity, plan, spending, options, sum(min(plan.samples, b.shape[0]) for b in blocks.values()))
    interrupted = False
    try:
        if spending.budget is not None:
            work.first_round(operator, largest_first)
        for name, block in largest_first.items():
            if not work.measure(name, block):
                break
    except KeyboardInterrupt:
        if must_be_whole() or not work.found:
            raise
        interrupted = True
    found = {name: work.found.get(name) or not_measured() for name in blocks}
    note = " ".join(_sentences(found, spending, interrupted))
    if interrupted:
        warn(f"The {quantity} by {by} was {note}")
    return ByBlock(found, quantity, by, note, _status(found, interrupted))


class _Work:
    """The results so far, and the progress over all blocks."""

    def __init__(
        self, quantity: Quantity, plan: SamplingPlan, spending: Spending, options: Options, total: int
    ) -> None:
        self.quantity, self.plan, self.spending, self.options = quantity, plan, spending, options
        self.found: dict[str, Estimate] = {}
        self._total = total if plan.rtol is None else None
        self._done = 0

    def first_round(self, operator: Operator, blocks: Mapping[str, Operator]) -> None:
        """Estimate every block from a few products."""
        if self.spending.left() < 2:
            raise CurvlensError(
                f"budget={str(self.spending.budget)!r} is less than two products of {operator!r}, which cost "
                f"{2 * self.spending.cost:.3g} gradients. Give a larger budget=."
            )
        if self.quantity == "trace":
            self._add_to_total(FEWEST)
            self._shared(operator, blocks)
            return
        self._add_to_total(sum(min(FIRST, block.shape[0]) for block in blocks.values()))
        for name, block in blocks.items():
            if self.spending.left() < min(FIRST, block.shape[0]):
                return
            self.found[name] = self._fewer(self._estimate(block, FIRST), block)

    def _shared(self, operator: Operator, blocks: Mapping[str, Operator]) -> None:
        products = CountedOperator(operator, symmetric=False, progress=self._progress())
        probes = products.probes(self.options.get("seed", 0))
        rows: list[torch.Tensor] = []
        while len(rows) < FEWEST and (len(rows) < 2 or self.spending.left() >= 1):
            z = probes.signs(len(rows))
            terms = z.double() * products(z).double()
            rows.append(torch.stack([operator.rows.extract(b.rows, terms).sum() for b in blocks.values()]).cpu())
            self.spending.steps += 1
        x = torch.stack(rows)
        value, stderr = x.mean(0), x.std(0) / math.sqrt(len(x))
        about = products.provenance(quantity=self.quantity, seed=self.options.get("seed", 0), sampled=len(x))
        note = f"budget: {len(x)} products of the whole operator"
        for i, name in enumerate(blocks):
            self.found[name] = Estimate(
                value[i], stderr[i], len(x), len(x) - 1, note, about, status=Status.STOPPED_AT_BUDGET
            )

    def measure(self, name: str, block: Operator) -> bool:
        """Estimate one block. Return whether the budget allows another one."""
        wanted, left = min(self.plan.samples, block.shape[0]), self.spending.left()
        if left < min(wanted, 2 * FEWEST):
            return False
        allowed = int(min(left, wanted))
        result = self._estimate(block, allowed)
        self.found[name] = self._fewer(result, block) if allowed < wanted else result
        if result.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        return True

    def _fewer(self, result: Estimate, block: Operator) -> Estimate:
        """The estimate with a note on its fewer samples, unless the block is so small that it is exact."""
        wanted = min(self.plan.samples, block.shape[0])
        if result.exact:
            return result
        note = f"budget: {result.samples} of {wanted} samples"
        return replace(result, note=note, status=Status.STOPPED_AT_BUDGET)

    def _estimate(self, block: Operator, samples: int) -> Estimate:
        """Estimate by products with the block; to ``rtol``, except with the few samples of the first round."""
        options: Options = {**self.options, "progress": self._progress()}
        accuracy = self.plan.rtol is not None and samples > FIRST
        options["rtol"] = self.plan.rtol if accuracy else None
        options["max_samples"] = max(samples, 2) if accuracy else None
        before = self._done
        result = estimate(self.quantity, block, None if accuracy else max(samples, 2), **options)
        self.spending.steps += result.samples
        self._done = before + result.samples
        return result

    def _add_to_total(self, products: int) -> None:
        if self._total is not None:
            self._total += products

    def _progress(self) -> Progress:
        """Count over all blocks. The total is not known if an accuracy is asked for."""
        start, progress = self._done, self.options.get("progress")

        def told(done: int, total: int | None) -> None:
            self._done = start + done
            if progress is not None:
                progress(self._done, self._total)

        return told


def _status(found: dict[str, Estimate], interrupted: bool) -> Status | None:
    """The status of the whole; None if it follows from the blocks."""
    if interrupted:
        return Status.INTERRUPTED
    return None if all(e.measured for e in found.values()) else Status.STOPPED_AT_BUDGET


def _sentences(found: dict[str, Estimate], spending: Spending, interrupted: bool) -> Iterator[str]:
    """The note on the whole: how it ended, what was spent, which blocks have fewer samples."""
    missing = [name for name, e in found.items() if not e.measured]
    if interrupted:
        yield f"interrupted: {len(found) - len(missing)} of {len(found)} are there."
    if spending.budget is not None:
        yield f"{spending} spent."
        fewer = [name for name, e in found.items() if e.status is Status.STOPPED_AT_BUDGET]
        if fewer:
            yield f"Fewer samples than asked for: {listing(fewer)}."
    if missing:
        yield f"Not measured: {listing(missing)}."
