"""How near an optimiser is to the edge of stability."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.line import Line
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Update(Result):
    """The step that the optimiser takes now, d = θ_before − θ_after, and the loss at multiples s of it.

    On a quadratic L(s) = L − s gᵀd + ½ s² dᵀHd.
    """

    slope: float
    """gᵀd: how fast the loss falls along the step."""
    curvature: float
    """dᵀHd."""
    sharpness: float | None
    """λ_dir = ΔᵀHΔ/gᵀΔ with d = ηΔ; None if groups have different learning rates, or gᵀΔ is not above 0."""
    best: float
    """The multiple that lowers the quadratic model most, gᵀd/dᵀHd; infinite without a positive curvature."""
    critical: float
    """The multiple at which the quadratic model is back at L, 2 gᵀd/dᵀHd."""
    measured: float
    """The same of the loss itself, by forward passes; infinite if it is not reached in the range."""
    line: Line
    """The loss along −d."""
    status: Status
    """How the search for ``measured`` ended."""

    def table(self) -> list[dict[str, Any]]:
        """One record."""
        names = ("slope", "curvature", "sharpness", "best", "critical", "measured")
        values = {name: getattr(self, name) for name in names}
        return [{name: x if x is None or math.isfinite(x) else None for name, x in values.items()}]

    def _pictured(self) -> Result:
        return self.line

    def __repr__(self) -> str:
        return printable(
            f"Update(one step changes the loss by {-self.slope:.3g} to first and {self.curvature / 2:+.3g} to second "
            f"order; it is back at its value after {self.critical:.3g} steps by the quadratic model, "
            f"{self.measured:.3g} measured)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Stability(Result):
    """λ_max(P̃^-½ H P̃^-½) of an optimiser: 1 is the edge, above it the quadratic model diverges."""

    rule: str
    """The class of the optimiser."""
    ratio: float
    """λ_max(P̃^-½ H P̃^-½), the fraction of the edge that is reached."""
    residual: float
    """‖A x − ratio x‖: an eigenvalue lies within this of ``ratio``."""
    sharpness: float | None
    """λ_max(P^-½ H P^-½), with coupled weight decay in H; None if groups differ in threshold."""
    threshold: float | None
    """The sharpness at the edge, in the convention of the optimiser; None if groups differ in it."""
    convention: str
    """The formula of the threshold."""
    headroom: float
    """All learning rates times this are still stable: 1/ratio, less with decoupled weight decay; infinite without
    positive curvature."""
    groups: list[dict[str, Any]]
    """A record for each group: lr (with the bias correction), factor c, threshold c/lr, decay, parameters, and the
    share of the group in the vector that leaves first."""
    mass: dict[str, float]
    """By block, the share in the vector that leaves first, ‖x_b‖²: they sum to 1, and ``ratio`` times them to it."""
    vector: Tensor
    """x, the unit eigenvector of P̃^-½ H P̃^-½; it is a warm start for the next call."""
    direction: Tensor
    """P̃^-½ x, scaled to length 1: where the parameters leave to."""
    products: int
    tol: float
    status: Status
    update: Update | None = None
    """Along the step that the optimiser takes now, if it was asked for."""
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_tensors(self, "vector", "direction")

    @property
    def stable(self) -> bool:
        """Whether the quadratic model is below the edge."""
        return self.ratio < 1

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, without the two long vectors."""
        return {name: value for name, value in super().to_dict().items() if name not in ("vector", "direction")}

    def table(self) -> list[dict[str, Any]]:
        """A record for each group, with its part of the ratio, which sum to it."""
        return [{"rule": self.rule, **group, "ratio": self.ratio * group["share"]} for group in self.groups]

    def __float__(self) -> float:
        return self.ratio

    def __repr__(self) -> str:
        first = sorted(self.mass, key=self.mass.__getitem__, reverse=True)[:3]
        where = ", ".join(f"{name} {100 * self.mass[name]:.0f} %" for name in first)
        both = "" if self.sharpness is None else f", sharpness {self.sharpness:.4g} of {self.threshold:.4g}"
        lines = [
            f"Stability({self.rule}: {self.ratio:.4g} ± {self.residual:.1g} of the edge, "
            f"{'stable' if self.stable else 'unstable'}{both}; learning rates × {self.headroom:.3g} reach it"
            f"{'; ' if self.note else ''}{self.note})",
            f"  {self.convention}",
            f"  first to leave: {where}",
            *([] if self.update is None else [f"  {self.update}"]),
        ]
        return "\n".join(map(printable, lines))
