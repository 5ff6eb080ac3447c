"""The noise of gradients from single samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result
from curvlens.results.by_block import ByBlock
from curvlens.results.estimate import Estimate
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Noise(Result):
    """Σ, the covariance of the gradient of one sample, as an estimate for the population that the data are from."""

    trace: Estimate
    """tr Σ."""
    gradient: Estimate
    """‖g‖², without the part tr Σ/n that is noise; it can come out negative where g is small."""
    scale: Estimate
    """The simple noise scale tr Σ/‖g‖², in samples: the batch whose noise is as large as its gradient. NaN where
    ``gradient`` is not above 0."""
    traces: ByBlock
    """tr Σ by block; they sum to ``trace``."""
    scales: ByBlock
    """The noise scale of each block by itself."""
    samples: int
    """Gradients that Σ was computed from."""
    each: str
    """What each of them is of: "sample", or "batch" where samples cannot be separated."""
    size: float
    """Samples in one of them; Σ is scaled by it to that of one sample."""
    status: Status
    curvature_trace: Estimate | None = None
    """tr(HΣ), with ``curvature=True``."""
    curvature_gradient: Estimate | None = None
    """gᵀHg, without its noise."""
    curvature_scale: Estimate | None = None
    """tr(HΣ)/gᵀHg, in samples; NaN where gᵀHg is not above 0."""
    products: int = 0
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        """A record for the whole, then one for each block: tr Σ and noise scale, with their errors."""
        rows = [("all", self.trace, self.scale)]
        rows += [(name, self.traces[name], self.scales[name]) for name in self.traces]
        return [
            {
                "block": name,
                "trace": _number(trace.value),
                "trace_error": _number(trace.stderr),
                "scale": _number(scale.value),
                "scale_error": _number(scale.stderr),
            }
            for name, trace, scale in rows
        ]

    def _pictured(self) -> Result:
        return self.traces

    def __float__(self) -> float:
        return float(self.scale)

    def __repr__(self) -> str:
        curved = "" if self.curvature_scale is None else f", tr(HΣ)/gᵀHg = {self.curvature_scale}"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Noise(scale {self.scale} samples, tr Σ = {self.trace}, ‖g‖² = {self.gradient}{curved}; from "
            f"{self.samples} gradients of one {self.each} each{note})"
        )


def _number(value: Any) -> float | None:
    x = float(value)
    return x if math.isfinite(x) else None
