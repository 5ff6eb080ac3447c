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
    gradients: ByBlock | None = None
    """‖g_b‖² of each block, without its noise; they sum to ``gradient``."""
    curvature_traces: ByBlock | None = None
    """tr(H_bb Σ_bb) of each block b, with ``curvature="block"``: H_bb is the diagonal block of H. They do not sum to
    ``curvature_trace``, which has the blocks off the diagonal as well."""
    curvature_gradients: ByBlock | None = None
    """g_bᵀ H_bb g_b, without its noise."""
    curvature_scales: ByBlock | None = None
    """Their ratio: the noise scale of steps that move this block alone."""
    products: int = 0
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        """A record for the whole, then one for each block: all numbers with their errors, None for those not there."""
        whole = (self.trace, self.gradient, self.scale)
        curved = (self.curvature_trace, self.curvature_gradient, self.curvature_scale)
        named = (self.traces, self.gradients, self.scales)
        within = (self.curvature_traces, self.curvature_gradients, self.curvature_scales)
        rows = [("all", [*whole, *curved])]
        rows += [(name, [None if each is None else each[name] for each in (*named, *within)]) for name in self.traces]
        columns = ("trace", "gradient", "scale", "curvature_trace", "curvature_gradient", "curvature_scale")
        records = []
        for name, estimates in rows:
            record: dict[str, Any] = {"block": name}
            for column, estimate in zip(columns, estimates, strict=True):
                record[column] = None if estimate is None else _number(estimate.value)
                record[f"{column}_error"] = None if estimate is None else _number(estimate.stderr)
            records.append(record)
        return records

    def _pictured(self) -> Result:
        return self.traces

    def __float__(self) -> float:
        return float(self.scale)

    def __repr__(self) -> str:
        curved = "" if self.curvature_scale is None else f", tr(HΣ)/gᵀHg = {self.curvature_scale}"
        note = f"; {self.note}" if self.note else ""
        scale = f"{self.scale} samples" if math.isfinite(float(self.scale)) else str(self.scale)
        return printable(
            f"Noise(noise scale {scale}, tr Σ = {self.trace}, ‖g‖² without noise = {self.gradient}{curved}; from "
            f"{self.samples} gradients of one {self.each} each{note})"
        )


def _number(value: Any) -> float | None:
    x = float(value)
    return x if math.isfinite(x) else None
