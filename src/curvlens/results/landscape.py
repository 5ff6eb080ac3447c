"""How the loss landscape settles as samples are added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.estimate import Estimate
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Landscape(Result):
    """Means of k samples and what one more changes, at θ and around it, over random orders of the samples.

    D_k(w) = (k + 1)(L_{k+1}(w) − L_k(w)), with ragged samples times c_{k+1}/C_{k+1} in place of 1/(k + 1).
    """

    k: Tensor
    """(K,): the numbers of samples."""
    increment: Tensor
    """(K,): RMS |L_{k+1} − L_k| at θ, over the orders."""
    distance: Tensor
    """(K,): RMS |L_k − L_n|/√(1 − k/n) at θ: the distance to the limit of endless data."""
    slopes: dict[str, Estimate]
    """Slopes of log RMS against log k, with errors over groups of orders: "increment", "distance", and with curvature
    "gradient" and "hessian"."""
    samples: int
    orders: int
    around: str
    """"sphere", "gaussian" or "subspace"."""
    radii: Tensor
    """(R,): radius of the sphere, or standard deviation of one entry."""
    mean: Tensor
    """(R, K): the mean of D_k over the surroundings, then over the orders, by the quadratic model."""
    second: Tensor
    """(R, K): E D_k², by the quadratic model."""
    true_mean: Tensor
    """(R, K): the same on the true loss, from random points around θ."""
    true_second: Tensor
    true_error: Tensor
    """(R, K): the standard error of ``true_second``, over the points."""
    bound: Tensor
    """(3, R, K): mean |Δl|, ‖Δg‖ r and ½ ‖ΔH‖_F r², whose sum bounds |D_k| up to O(r³)."""
    gradient_distance: Tensor
    """(K,): RMS ‖g_k − g_n‖/√(1 − k/n)."""
    hessian_distance: Tensor
    """(K,): RMS ‖H_k − H_n‖_F/√(1 − k/n)."""
    gradient_norm: float
    """‖g‖ at θ, of the block with ``within``. The moments do not assume a minimum."""
    holds: float | None
    """The largest radius at which model and true second moment agree: to 5 %, or within twice the error of points and
    probes if that is below 20 %. None if they are seen to agree at no radius, or none was given."""
    status: Status
    second_error: Tensor | None = None
    """(R, K): the standard error of ``second``, over the probes; 0 in the span of a basis, NaN with 2 probes."""
    terms: Tensor | None = None
    """(3, R, K): E of the squares of Δl, of Δgᵀδ and of ½ δᵀΔHδ, by the quadratic model. With E Δl δᵀΔHδ they make up
    ``second``."""
    products: int = 0
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_tensors(self, "k", "increment", "distance", "radii", "mean", "second", "true_mean", "true_second")
        require_tensors(self, "true_error", "bound", "gradient_distance", "hessian_distance")
        if self.second_error is not None:
            require_tensors(self, "second_error")

    def table(self) -> list[dict[str, Any]]:
        """A record for each k."""
        columns = {"increment": self.increment, "distance": self.distance}
        if len(self.hessian_distance):
            columns |= {"gradient_distance": self.gradient_distance, "hessian_distance": self.hessian_distance}
        return [
            {"samples": int(k), **{name: float(values[i]) for name, values in columns.items()}}
            for i, k in enumerate(self.k.tolist())
        ]

    def around_table(self) -> list[dict[str, Any]]:
        """A record for each radius and k: (k + 1)(L_{k+1} − L_k) as root mean square, by the model and in truth."""
        return [
            {
                "radius": float(radius),
                "samples": int(k),
                "model": max(float(self.second[i, j]), 0.0) ** 0.5,
                "true": float(self.true_second[i, j]) ** 0.5,
            }
            for i, radius in enumerate(self.radii)
            for j, k in enumerate(self.k)
        ]

    def __repr__(self) -> str:
        slopes = ", ".join(f"{name} {slope}" for name, slope in self.slopes.items())
        holds = "" if self.holds is None else f"; quadratic up to {self.holds:.3g} ({self.around})"
        if self.holds is None and len(self.radii) and not self.note:
            holds = f"; not quadratic at {float(self.radii[0]):.3g} ({self.around}), the smallest radius"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Landscape({self.samples} samples, {self.orders} orders; slopes {slopes}; ‖g‖ {self.gradient_norm:.3g}"
            f"{holds}{note})"
        )
