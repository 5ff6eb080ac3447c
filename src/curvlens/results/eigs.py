"""Eigenvalues with their vectors and residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from curvlens.blocks import Block, Blocks, By, Layout
from curvlens.blocks.parts import Part, parse
from curvlens.errors import CurvlensError, printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.status import Status

if TYPE_CHECKING:
    from curvlens.operators.base import Operator


@dataclass(frozen=True, eq=False, repr=False)
class Eigs(Result):
    """Eigenpairs in ascending order; repeated values appear with their multiplicity.

    An eigenvalue of the operator lies within ``residuals[i]`` of ``values[i]``: this is a theorem, not an estimate.
    """

    values: Tensor
    """(k,), ascending."""
    vectors: Tensor
    """(n, k), orthonormal columns."""
    residuals: Tensor
    """‖A x − λ x‖, from a product with each returned vector."""
    converged: Tensor
    """(k,), whether the residual is below ``tol`` times ``norm``."""
    status: Status
    """How the search ended."""
    tol: float
    norm: float
    """The largest |eigenvalue| found; ``tol`` is relative to it."""
    products: int
    memory: int
    """The announced peak in bytes: basis, vectors, and the memory for products."""
    ends: str = "largest"
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """The parameters that the entries of a vector belong to, or the expressions that cut them out."""
    blocks: dict[str, list[str]] = field(default_factory=dict)
    """The named blocks, and the parts that each consists of."""
    maps: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """The same by head, layer and role, if the architecture is known."""
    provenance: Provenance = field(default_factory=dict)
    note: str = ""
    """A remark for the reader: where and why the search ended."""

    def __post_init__(self) -> None:
        require_tensors(self, "values", "vectors", "residuals", "converged")

    def __len__(self) -> int:
        return len(self.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers. Blocks appear once, by name, not also by parameter, head, layer and role."""
        return {name: value for name, value in super().to_dict().items() if name not in ("shapes", "maps")}

    def table(self) -> list[dict[str, Any]]:
        """A record for each eigenvalue, ascending: value, residual, converged."""
        triples = zip(self.values.tolist(), self.residuals.tolist(), self.converged.tolist(), strict=True)
        return [{"value": value, "residual": residual, "converged": ok} for value, residual, ok in triples]

    def mass(self, by: By = "block") -> dict[str, list[float]]:
        """The share of each block in each eigenvector, ‖x_b‖². The shares of a vector sum to 1.

        ``by`` is "block", "layer", "role", "head" or "parameter".
        """
        order = self._order()
        named = self.maps.get(by, self.blocks if by == "block" else None)
        if by == "head" and self.maps and named is None:
            raise CurvlensError(
                "by='head': the number of heads was not known. Give it: Problem(..., heads=6), and compute the "
                "eigenvectors for that problem."
            )
        if named:
            blocks = Blocks([self._block(name, keys) for name, keys in named.items()], order)
        else:
            blocks = Blocks.of_parameters(order).by(by)
        parts = blocks.split(self.vectors.double())
        return {name: x.square().sum(0).tolist() for name, x in parts.items()}

    def operator(self) -> Operator:
        """Σ λ_i x_i x_iᵀ as an operator, so that ``H - eigs.operator()`` is H without these eigenpairs."""
        from curvlens.operators.composition import LowRank

        order = self._order()
        blocks = Blocks([self._block(name, keys) for name, keys in self.blocks.items()], order) if self.blocks else None
        return LowRank(self.vectors, self.values.clone(), Layout(order, blocks))

    def _order(self) -> list[Part]:
        """The parts that the entries of a vector belong to."""
        return [parse(key, tuple(shape)) for key, shape in self.shapes.items()]

    def _block(self, name: str, keys: list[str]) -> Block:
        return Block(name, tuple(parse(key, tuple(self.shapes.get(key, ()))) for key in keys))

    def gaps(self) -> Tensor:
        """Differences λ_{i+1} − λ_i of neighbours. With both ends, the middle one is not a gap of the spectrum."""
        return self.values.diff()

    def condition(self) -> float:
        """max |λ| / min |λ| over the returned eigenvalues only."""
        sizes = self.values.abs()
        if not len(sizes) or not float(sizes.min()):
            raise CurvlensError("An eigenvalue is 0, or none was computed: there is no condition number on this span.")
        return float(sizes.max() / sizes.min())

    def __repr__(self) -> str:
        done = int(self.converged.sum())
        note = f", {self.note}" if self.note else ""
        head = f"Eigs({self.ends}, {done} of {len(self)} converged, {self.products} products{note})"
        triples = zip(self.values.tolist(), self.residuals.tolist(), self.converged.tolist(), strict=True)
        rows = [f"  {_told(value, r)} ± {r:.0e}{'' if ok else '  not converged'}" for value, r, ok in triples]
        if len(rows) > 24:
            rows = [*rows[:10], f"  … {len(rows) - 20} more …", *rows[-10:]]
        return "\n".join([printable(head), *rows])

    def __float__(self) -> float:
        if len(self) != 1:
            raise CurvlensError(f"There are {len(self)} eigenvalues; only a single one is a number. Use .values.")
        return float(self.values[0])


def _told(value: float, residual: float) -> str:
    """With two digits more than the residual leaves certain, nine at most."""
    certain = math.log10(abs(value) / residual) if value and residual else 9.0
    return f"{value: .{min(max(math.ceil(certain) + 2, 2), 9)}g}"
