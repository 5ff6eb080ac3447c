"""An estimate of a number, or of one for each parameter: an exact part plus a mean of samples, with its error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from scipy import special
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.interrupts import must_be_whole
from curvlens.linalg.basis import Basis, BasisPlace
from curvlens.linalg.basis import budget as room_for
from curvlens.linalg.counted import CountedOperator, warn, whole
from curvlens.linalg.deflation import Deflation, Outlook, deflate
from curvlens.linalg.probes import Probes
from curvlens.operators.base import Progress
from curvlens.results import Estimate, Status

Quantity = Literal["trace", "square", "diagonal"]

SAMPLES = 32
FEWEST = 6
"""The fewest samples for which a standard error means something."""
LEVEL = 0.95
"""The confidence level for ``rtol``."""


SKEWED = 4.0
"""The loss of degrees of freedom by the spread of squares; see `degrees`."""


def degrees(count: int, mean: Tensor, variance: Tensor) -> Tensor:
    """The degrees of freedom of the error of a mean of squares, 2/(2/(n−1) + SKEWED c/n) with c = variance/mean².

    Squares ‖A z‖² and ‖u‖² are nearly gamma variables with excess kurtosis 6c, so Satterthwaite's count for their
    sample variance is 2/(2/(n−1) + 6c/n). On the logarithm the error is that of variance/mean², which for a gamma
    variable does not depend on the mean, and the 6 becomes 2 to first order in 1/n. Measurements with 8 to 64 samples
    require 4 (`docs/howto/spectra.md`, "How far to trust the intervals"). Flat spectra have a small c and lose nothing.
    """
    c = variance / mean.square().clamp(min=1e-300)
    return (2 / (2 / (count - 1) + SKEWED * c / count)).clamp(min=1.0)


@dataclass(frozen=True)
class SamplingPlan:
    """How long to sample: to a number of products, or to a relative accuracy."""

    samples: int
    rtol: float | None


def sampling_plan(samples: int | None, rtol: float | None, max_samples: int | None) -> SamplingPlan:
    """Check the user's options and make a plan."""
    if samples is not None and rtol is not None:
        raise CurvlensError("Give samples= or rtol=, not both; max_samples= limits the search for rtol=.")
    for name, value in (("samples", samples), ("max_samples", max_samples)):
        if value is not None and (not whole(value) or value < 2):
            raise CurvlensError(f"{name}={value!r}, expected a whole number of products, 2 or more.")
    if rtol is None:
        return SamplingPlan(SAMPLES if samples is None else int(samples), None)
    if not (isinstance(rtol, (int, float)) and 0 < rtol < 1):
        raise CurvlensError(f"rtol={rtol}, expected a number between 0 and 1, such as 0.01 for one percent.")
    return SamplingPlan(10_000 if max_samples is None else int(max_samples), rtol)


class Options(TypedDict, total=False):
    """The options of all estimators; see `curvlens.trace`."""

    rtol: float | None
    max_samples: int | None
    seed: int
    memory: int | float | str | None
    store: BasisPlace
    progress: Progress | None
    budget: str | float | None


def estimate(
    quantity: Quantity,
    operator: Any,
    samples: int | None = None,
    *,
    rtol: float | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    memory: int | float | str | None = None,
    store: BasisPlace = "device",
    progress: Progress | None = None,
    budget: str | float | None = None,
) -> Estimate:
    """The sum of a small exact part and the mean of samples of the rest. ``budget`` is for callers with many blocks."""
    plan = sampling_plan(samples, rtol, max_samples)
    products = CountedOperator(operator, symmetric=False, progress=progress)
    n = products.n
    probes = products.probes(seed)
    products.total = min(plan.samples, n) if plan.rtol is None else None
    if n <= plan.samples and (plan.rtol is None or n <= 2 * FEWEST):
        return _exact(quantity, products)
    room = max(room_for(memory, store, products.device) // (n * products.dtype.itemsize) - 4, 0)
    # At most half of the products go into the exact part; with few products, none.
    most = min(plan.samples // 2, n, 256, room)
    basis = Basis(most if most > 3 else 0, n, dtype=products.dtype, device=products.device, store=store)

    def samples_left(spent: int, outlook: Outlook) -> float:
        if plan.rtol is None:
            return plan.samples - spent
        # The variance of one sample, and the allowed error.
        variance, target = {
            "trace": (2 * outlook.rest, abs(outlook.trace)),
            "square": (2 * outlook.rest * outlook.edge, 2 * outlook.square),
            "diagonal": (outlook.rest, abs(outlook.trace) / math.sqrt(n)),
        }[quantity]
        return min(variance * (1.96 / max(plan.rtol * target, 1e-150)) ** 2, n - spent)

    parts = deflate(products, basis, probes, samples_left, diagonal=quantity == "diagonal")
    hopeless = parts.outlook is not None and samples_left(parts.size, parts.outlook) >= n - parts.size
    if plan.rtol is not None and n <= plan.samples and hopeless and not parts.interrupted:
        return _exact(quantity, products)
    run = _Run(quantity, products, parts, probes)
    if parts.interrupted:  # a result needs a few samples of the rest
        plan = SamplingPlan(products.count + 3, None)
    try:
        status, note = run.go(plan)
    except KeyboardInterrupt:
        if must_be_whole() or run.count < 2:
            raise
        status, note = Status.INTERRUPTED, f"interrupted after {products.count} products"
        if not parts.interrupted:
            warn(f"The {quantity} was {note}; the error is that of what was done.")
    if status is Status.EXACT:
        return _exact(quantity, products)
    if parts.interrupted:
        status, note = Status.INTERRUPTED, f"interrupted after {products.count} products"
        warn(f"The {quantity} was {note}; the error is that of what was done.")
    value, stderr = run.value()
    return Estimate(
        value=value,
        stderr=stderr,
        samples=products.count,
        dof=run.dof,
        fixed=parts.square if quantity == "square" else 0.0,
        note=note,
        status=status,
        provenance=products.provenance(quantity=quantity, seed=seed, deflated=parts.size, sampled=run.count),
    )


class _Run:
    """Mean and spread of the samples, by Welford's update in float64."""

    def __init__(self, quantity: Quantity, products: CountedOperator, parts: Deflation, probes: Probes) -> None:
        self.quantity, self.products, self.parts = quantity, products, parts
        self._probes = probes
        self.count = 0
        shape = (products.n,) if quantity == "diagonal" else ()
        home = products.device if quantity == "diagonal" else torch.device("cpu")
        self._mean = torch.zeros(shape, dtype=torch.float64, device=home)
        self._spread = torch.zeros(shape, dtype=torch.float64, device=home)

    def go(self, plan: SamplingPlan) -> tuple[Status, str]:
        """Sample until the plan is done; compute all columns if that costs no more. Return the status and a note."""
        if self.parts.everything:
            return Status.SAMPLED, ""
        check = FEWEST
        while True:
            if self.products.count >= plan.samples:
                if plan.rtol is None:
                    return Status.SAMPLED, ""
                note = f"rtol={plan.rtol:g} not reached after {self.products.count} products"
                warn(f"The {self.quantity}: {note}. `stderr` shows the accuracy reached.")
                return Status.ACCURACY_NOT_REACHED, note
            self.sample()
            if plan.rtol is not None and self.count >= check:
                if self.close_enough(plan.rtol):
                    return Status.CONVERGED, ""
                if self.products.count >= self.products.n:
                    return Status.EXACT, ""
                check = math.ceil(1.3 * self.count)

    def sample(self) -> None:
        """Add one sample, by one product."""
        z = self._probes.signs(self.count)
        y = self.parts.project(z.clone())
        w = self.products(y).double()
        if self.quantity == "trace":
            x = (y.double() @ w).cpu()
        elif self.quantity == "square":
            x = (w @ w).cpu()
        else:
            x = z.double() * w
        self.count += 1
        step = x - self._mean
        self._mean += step / self.count
        self._spread += step * (x - self._mean)

    def value(self) -> tuple[Tensor, Tensor]:
        """The estimate and its standard error."""
        exact = {"trace": self.parts.trace, "square": self.parts.square, "diagonal": self.parts.diagonal}[self.quantity]
        assert exact is not None
        value = self._mean + exact
        if self.count < 2:
            return value, torch.zeros_like(value)
        stderr = (self._spread / (self.count - 1) / self.count).sqrt()
        if not value.ndim:
            stderr = stderr.clamp(min=self.products.eps * float(value.abs()))  # at least the rounding error
        return value, stderr

    @property
    def dof(self) -> float:
        """The degrees of freedom of the standard error."""
        if self.count < 2:
            return math.inf if not self.count else 1.0
        if self.quantity != "square":
            return self.count - 1
        return float(degrees(self.count, self._mean, self._spread / (self.count - 1)))

    def close_enough(self, rtol: float) -> bool:
        """Whether the interval is short enough; for the diagonal as a whole, in the Euclidean norm."""
        value, stderr = self.value()
        if self.quantity == "square":
            norm = root(Estimate(value, stderr, self.products.count, self.dof, fixed=self.parts.square))
            return float(norm.half_width(LEVEL)) <= rtol * float(norm)
        t = float(special.stdtrit(self.dof, (1 + LEVEL) / 2))
        return float(stderr.norm()) * t <= rtol * float(value.norm())


def root(square: Estimate) -> Estimate:
    """The norm from its square, with its error to first order."""
    value = square.value.clamp(min=0).sqrt()
    stderr = square.stderr / (2 * value.clamp(min=1e-300))
    return replace(square, value=value, stderr=stderr, positive=not square.exact)


def _exact(quantity: Quantity, products: CountedOperator) -> Estimate:
    """The exact value, column by column, if that takes fewer products than asked for."""
    diagonal = torch.zeros(products.n, dtype=torch.float64, device=products.device)
    square = 0.0
    for i, w in enumerate(products.columns()):
        diagonal[i] = w[i].double()
        square += float(w.double().square().sum())
    value = {
        "trace": diagonal.sum().cpu(),
        "square": torch.tensor(square, dtype=torch.float64),
        "diagonal": diagonal,
    }[quantity]
    return Estimate(
        value=value,
        stderr=torch.zeros_like(value),
        samples=products.count,
        provenance=products.provenance(quantity=quantity),
    )
