"""The solution of a linear system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Result):
    """x with (A + damping) x ≈ b."""

    x: Any
    """The solution in the format of b: a flat tensor, an array or a dict by parameter name."""
    residual: float
    """‖b − (A + damping) x‖ / ‖b‖, from a product with x."""
    status: Status
    """How the solve ended. For a system without a solution it is ``INCONSISTENT``, and x is a best fit."""
    products: int
    method: str
    damping: float
    history: list[float] = field(default_factory=list)
    """The relative residual after each step, as the method estimates it."""
    provenance: Provenance = field(default_factory=dict)
    note: str = ""
    """A remark for the reader: why the accuracy was not reached."""

    @property
    def converged(self) -> bool:
        """Whether the residual is as small as requested."""
        return self.status is Status.CONVERGED

    def table(self) -> list[dict[str, Any]]:
        """The relative residual, step by step."""
        return [{"step": step, "residual": residual} for step, residual in enumerate(self.history)]

    def __repr__(self) -> str:
        return printable(
            f"Solution({self.method}, damping {self.damping:g}, residual {self.residual:.1e} after {self.products} "
            f"products: {self.note or self.status.value})"
        )
