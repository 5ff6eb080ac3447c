"""How many samples a loss or a gradient needs to settle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result
from curvlens.results.by_block import ByBlock
from curvlens.results.estimate import Estimate
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class DataSize(Result):
    """The smallest numbers of samples for a tolerance, in two readings. They differ by a square: one more sample moves
    a mean of k by 1/k, but the mean itself is still 1/√k away from its limit."""

    of: str
    """What settles: "loss", "gradient" or "hessian"."""
    tolerance: float
    increment: int
    """k from which on one more sample changes it by no more than the tolerance."""
    distance: int
    """k from which on it is no farther than the tolerance from its limit."""
    confidence: float | None
    """The probability with which both hold; None: as root mean square."""
    spread: Estimate
    """σ: the root mean square distance of one sample from the mean of all."""
    samples: int
    """Samples that the spread was measured on."""
    dof: float
    """Directions that the noise is spread over, (tr Σ)²/tr Σ²; 1 for a loss."""
    status: Status
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        """A record for each reading."""
        rows = {"increment": self.increment, "distance": self.distance}
        return [
            {"of": self.of, "reading": name, "tolerance": self.tolerance, "confidence": self.confidence, "samples": k}
            for name, k in rows.items()
        ]

    def _pictured(self) -> Result:
        def exact(k: int) -> Estimate:
            number, zero = (torch.tensor(float(x), dtype=torch.float64, device="cpu") for x in (k, 0))
            return Estimate(number, zero, 1)

        return ByBlock({"increment": exact(self.increment), "distance": exact(self.distance)}, "samples")

    def __repr__(self) -> str:
        how = "as root mean square" if self.confidence is None else f"with a confidence of {100 * self.confidence:g} %"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"DataSize({self.of} to {self.tolerance:g}, {how}: one more sample changes it by less from "
            f"{self.increment:,} samples on; it is as close to its limit from {self.distance:,} on; σ = {self.spread} "
            f"from {self.samples} samples{note})"
        )
