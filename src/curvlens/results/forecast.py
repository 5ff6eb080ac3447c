"""The course that an optimiser would take on the quadratic model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.status import Status

HUGE = 1e4
"""Times the loss: from there on a forecast is not a number to read."""


@dataclass(frozen=True, eq=False, repr=False)
class Forecast(Result):
    """Loss and distance from the start after each step of an optimiser on the quadratic model; the true ones beside."""

    rule: str
    losses: Tensor
    """(T + 1,): the loss of the quadratic model after 0, 1, …, T steps. Of the loss alone, without weight decay."""
    distances: Tensor
    """(T + 1,): ‖θ_t − θ_0‖."""
    exact: int
    """Up to this step nothing but rounding is between these numbers and the quadratic model; later ones are an
    approximation by the Ritz values."""
    true_losses: Tensor
    """(n + 1,): the loss where the optimiser really goes, for the first n steps; infinite where it is NaN."""
    true_distances: Tensor
    """(n + 1,): how far it really goes."""
    departure: int | None
    """The first step at which forecast and true loss differ by more than ``agreement`` of the largest change so far;
    None if they agree over all n steps."""
    agreement: float
    products: int
    status: Status
    """Complete, or interrupted."""
    mean: Tensor | None = None
    """(T + 1,): the expected loss with noisy gradients, if a batch size was given."""
    mean_error: Tensor | None = None
    """(T + 1,): its standard error, from the samples of the noise."""
    batch: int | None = None
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_tensors(self, "losses", "distances", "true_losses", "true_distances")
        if self.mean is not None:
            require_tensors(self, "mean", "mean_error")

    def table(self) -> list[dict[str, Any]]:
        """A record for each step."""
        columns = {
            "loss": self.losses,
            "distance": self.distances,
            "true_loss": self.true_losses,
            "true_distance": self.true_distances,
            "mean_loss": self.mean,
            "mean_error": self.mean_error,
        }
        lists = {name: [] if x is None else x.tolist() for name, x in columns.items()}
        return [
            {"step": t, **{name: _finite(x[t]) if t < len(x) else None for name, x in lists.items()}}
            for t in range(len(self.losses))
        ]

    def _end(self) -> str:
        """The last loss, or that there is none that means anything."""
        first, last = float(self.losses[0]), float(self.losses[-1])
        if abs(last) <= HUGE * max(abs(first), 1.0):
            return f"→ {last:.6g}"
        how = "beyond float64" if math.isinf(last) else f"to {last:.1e}"
        return f"→ without limit, {'up' if last > 0 else 'down'} {how}"

    def __repr__(self) -> str:
        last = len(self.losses) - 1
        checked = len(self.true_losses) - 1
        if not checked:
            true = "not compared with the true loss"
        elif self.departure is None:
            true = f"agrees with the true loss to {100 * self.agreement:g} % over {checked} steps"
        else:
            true = f"parts from the true loss by {100 * self.agreement:g} % at step {self.departure}"
        noisy = "" if self.mean is None else f", {float(self.mean[-1]):.6g} on average with batches of {self.batch}"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Forecast({self.rule}: loss {float(self.losses[0]):.6g} {self._end()} after {last} steps"
            f"{noisy}; {true}; {self.products} products{note})"
        )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
