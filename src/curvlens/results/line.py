"""The loss along a line, beside its quadratic model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Line(Result):
    """The loss at θ + t u, ‖u‖ = 1, and L + t gᵀu + ½ t² uᵀHu, for t of both signs."""

    radii: Tensor
    """(m,), every t at which the loss was computed, ascending; 0 is among them."""
    losses: Tensor
    """(m,), the loss there; infinite where it is NaN or infinite."""
    model: Tensor
    """(m,), the quadratic model there."""
    slope: float
    """gᵀu."""
    curvature: float
    """uᵀHu."""
    forward: float
    """The radius on the side t > 0 up to which loss and model agree; 0 if they do not agree anywhere in the range."""
    backward: float
    """The same on the side t < 0, as a positive number."""
    forward_open: bool
    """Whether they still agree at the end of the range: the radius is then at least ``forward``."""
    backward_open: bool
    """The same on the side t < 0."""
    agreement: float
    """The share of the predicted change by which loss and model may differ."""
    floor: float
    """The change of the loss below which rounding decides: differences are compared with this at least."""
    norm: float
    """‖direction‖ as it was given: ``t / norm`` is a multiple of it."""
    status: Status
    """Converged: both radii are bracketed to 5 %. Complete: the radii that were given were all computed, or the two
    agree over the whole range."""
    evaluations: int
    """Forward passes over the data."""
    third: float | None = None
    """∇³L[u, u, u], if it was asked for: L + t gᵀu + ½ t² uᵀHu + ⅙ t³ of it is the cubic model."""
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_tensors(self, "radii", "losses", "model")

    @property
    def loss(self) -> float:
        """The loss at t = 0."""
        return float(self.losses[int(self.radii.abs().argmin())])

    @property
    def radius(self) -> float:
        """The smaller of the two radii: the model holds on both sides."""
        return min(self.forward, self.backward)

    def table(self) -> list[dict[str, Any]]:
        """A record for each t, ascending: t, loss (None where it is not finite), quadratic model, cubic model."""
        triples = zip(self.radii.tolist(), self.losses.tolist(), self.model.tolist(), strict=True)
        rows = [{"t": t, "loss": x if math.isfinite(x) else None, "model": model} for t, x, model in triples]
        if self.third is not None:
            rows = [{**row, "cubic": row["model"] + self.third * row["t"] ** 3 / 6} for row in rows]
        return rows

    def __repr__(self) -> str:
        said = [
            f"{side} {'≥ ' if open else ''}{radius:.3g}"
            for side, radius, open in (
                ("forward", self.forward, self.forward_open),
                ("backward", self.backward, self.backward_open),
            )
        ]
        note = f"; {self.note}" if self.note else ""
        third = "" if self.third is None else f", third derivative {self.third:.4g}"
        return printable(
            f"Line(loss {self.loss:.6g}, slope {self.slope:.4g}, curvature {self.curvature:.4g}{third}; quadratic to "
            f"{100 * self.agreement:g} % up to t = {', '.join(said)}; {self.evaluations} forward passes{note})"
        )
