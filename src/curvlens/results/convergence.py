"""How fast gradient descent settled, and how curved its path was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.estimate import Estimate
from curvlens.results.status import Status

RESOLVED = 0.1
"""The most that rounding may be of a curvature that is shown."""

AGREEMENT = 0.01
"""Of log ‖g‖ lost in a step: how far a prediction may be off where the interval is narrower, as without any noise."""


@dataclass(frozen=True, eq=False, repr=False)
class Convergence(Result):
    """A trajectory of full-batch losses and gradients: curvature along the path, rate seen, rate by a spectrum."""

    rule: str
    edge: float | None
    """2/η of gradient descent: a step along a larger curvature raises the loss. None with momentum."""
    losses: Tensor
    """(T + 1,)."""
    gradients: Tensor
    """(T + 1,): ‖g_t‖; empty if none were given."""
    curvature: Tensor
    """(T,): dᵀHd/‖d‖² along each step d, by the change of the loss; for gradient descent gᵀHg/‖g‖². Exact on a
    quadratic. Empty if the steps are not known."""
    curvature_error: Tensor
    """(T,): how far the rounding of the losses may put it off."""
    secant: Tensor
    """(T,): the same by the change of the gradient, dᵀ(g_{t+1} − g_t)/‖d‖². The two differ where the loss is not
    quadratic along the step. Empty unless gradients were given as vectors."""
    rate: Estimate
    """The factor of ‖g‖ in one step, over the window: below 1 it shrinks. NaN if there are too few steps."""
    of: str
    """What the rate is of: "gradient", or "decrements", the square roots of L_t − L_{t+1}, which shrink alike."""
    window: tuple[int, int]
    """The first and the last step that the rate was fitted on."""
    spectrum_steps: Tensor
    """(S,): the steps that spectra were given for."""
    smallest: Tensor
    """(S,): the smallest |λ| of each, without those that count as 0."""
    largest: Tensor
    """(S,): the largest |λ|."""
    subspace: str
    """What the eigenvalues are of."""
    predicted: float | None
    """The largest factor in one step on the quadratic model with the last of the spectra; None without a spectrum."""
    slowest: float | None
    """The eigenvalue that has it."""
    status: Status
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_tensors(self, "losses", "gradients", "curvature", "curvature_error", "secant")
        require_tensors(self, "spectrum_steps", "smallest", "largest")
        if not isinstance(self.window, tuple):
            object.__setattr__(self, "window", tuple(self.window))

    @property
    def condition(self) -> Tensor:
        """(S,): the condition number max |λ|/min |λ| on the subspace, at each of ``spectrum_steps``."""
        return self.largest / self.smallest

    @property
    def agrees(self) -> bool | None:
        """Whether the predicted rate is in the 95 % interval of the one seen, or its logarithm within 1 % of that; None
        if one of them is missing."""
        if self.predicted is None or not math.isfinite(float(self.rate)):
            return None
        low, high = self.rate.interval()
        if low <= self.predicted <= high:
            return True
        seen = math.log(float(self.rate))
        return self.predicted > 0 and abs(math.log(self.predicted) - seen) <= AGREEMENT * abs(seen)

    def table(self) -> list[dict[str, Any]]:
        """A record for each step."""
        conditions = dict(zip(self.spectrum_steps.tolist(), self.condition.tolist(), strict=True))
        columns = {
            "loss": self.losses.tolist(),
            "gradient": self.gradients.tolist(),
            "curvature": self.curvature.tolist(),
            "curvature_error": self.curvature_error.tolist(),
            "secant": self.secant.tolist(),
        }
        return [
            {"step": t, **{name: _at(values, t) for name, values in columns.items()}, "condition": conditions.get(t)}
            for t in range(len(self.losses))
        ]

    def shown_curvature(self) -> list[tuple[int, float]]:
        """Step and curvature where rounding leaves a digit of it."""
        pairs = zip(self.curvature.tolist(), self.curvature_error.tolist(), strict=True)
        return [(t, k) for t, (k, error) in enumerate(pairs) if error <= RESOLVED * abs(k)]

    def __repr__(self) -> str:
        last = len(self.losses) - 1
        parts = [f"loss {float(self.losses[0]):.6g} → {float(self.losses[-1]):.6g} in {last} steps"]
        if curved := self.shown_curvature():
            edge = "" if self.edge is None else f", 2/η = {self.edge:.4g}"
            (first, start), (final, end) = curved[0], curved[-1]
            where = "" if final >= len(self.curvature) - 2 else f" at step {final}, rounding hides it after that"
            parts.append(f"curvature along the path {start:.4g} → {end:.4g}{where}{edge}")
        if math.isfinite(float(self.rate)):
            low, high = map(float, self.rate.interval())
            first, final = self.window
            parts.append(
                f"‖g‖ times {_digits(float(self.rate), high - low)} ({_digits(low, high - low)} to "
                f"{_digits(high, high - low)}) in a step, from step {first} to {final}"
            )
        if self.predicted is not None:
            agrees = {True: ", which agrees", False: ", which does not agree", None: ""}[self.agrees]
            of = f" of {self.subspace}" if self.subspace else ""
            parts.append(f"predicted {self.predicted:.6g}, from λ = {self.slowest:.4g}{of}{agrees}")
        if len(self.smallest):
            parts.append(f"condition number {float(self.condition[-1]):.4g} there")
        note = f"; {self.note}" if self.note else ""
        return printable(f"Convergence({self.rule}: {'; '.join(parts)}{note})")


def _digits(x: float, width: float) -> str:
    """As many decimals as an interval of so much width can tell, two more than its first digit."""
    decimals = 6 if width <= 0 else min(max(1 - math.floor(math.log10(width)), 0), 9)
    return f"{x:.{decimals}f}"


def _at(values: list[float], t: int) -> float | None:
    return values[t] if t < len(values) and math.isfinite(values[t]) else None
