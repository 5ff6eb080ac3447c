"""Products of operators: A @ B, AᵀA, congruences D A D; diagonal and low-rank operators as factors.

A product is symmetric if reversing the factors and transposing each gives the same factors. With an even number of
factors it then is BᵀB, so positive semidefinite. With an odd number it is so if the middle factor is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, a_kind
from curvlens.operators.algebra import Restricted, as_operator, nameless
from curvlens.operators.base import Operator, Progress
from curvlens.results import Estimate


class Diagonal(Operator):
    """diag(d)."""

    def __init__(self, values: Tensor, layout: Layout) -> None:
        psd = bool((values >= 0).all())
        super().__init__(
            layout, layout, dtype=values.dtype, device=values.device, symmetric=True, psd=psd, name="Diagonal"
        )
        self.values = values

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        return vectors * self.values.to(vectors)[:, None]

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        if rows != columns:
            return Restricted(self, rows, columns)
        return Diagonal(self.rows.extract(rows, self.values), rows)

    def _with_names(self, rows: Layout, columns: Layout) -> Operator:
        if nameless(self.rows):
            return Diagonal(self.values, rows) if rows == columns and rows.size == self.rows.size else self
        same = set(self.rows.names) == set(rows.names) and rows == columns
        return Diagonal(rows.flatten(self.rows.unflatten(self.values)), rows) if same else self


def diagonal(values: Tensor | np.ndarray | Mapping[str, Tensor] | Estimate) -> Operator:
    """diag(values): multiply every entry by its own number. ``values`` is a flat vector, a dict by parameter name, or
    the estimate that `curvlens.diagonal` returns.

    Combined with an operator of a problem, it gets the names of the parameters.

    >>> D = diagonal(torch.tensor([1.0, 2.0]))
    >>> (D @ torch.ones(2)).tolist(), D.psd
    ([1.0, 2.0], True)
    """
    if isinstance(values, Estimate):
        values = values.value
    if isinstance(values, Mapping):
        layout = Layout({name: tuple(part.shape) for name, part in values.items()})
        flat = layout.flatten(values)
    else:
        flat = torch.as_tensor(values).detach().clone()  # `psd` must stay true when the user writes into the vector
        if flat.ndim != 1:
            raise CurvlensError(
                f"A diagonal is a flat vector or a dict by parameter name; got {a_kind(values)} of shape "
                f"{tuple(flat.shape)}. Use .reshape(-1)."
            )
        layout = Layout({"rows": (len(flat),)})
    if flat.is_complex():
        raise CurvlensError("The diagonal is complex, expected a real one.")
    flat = flat if flat.is_floating_point() else flat.double()
    bad = int((~flat.isfinite()).sum())
    if bad:
        raise CurvlensError(
            f"{bad} of {len(flat)} numbers of the diagonal are NaN or infinite. If you divide, clamp the divisor: "
            "x.clamp(min=1e-12)."
        )
    return Diagonal(flat, layout)


class LowRank(Operator):
    """U diag(c) Uᵀ."""

    def __init__(self, vectors: Tensor, values: Tensor, layout: Layout) -> None:
        super().__init__(
            layout,
            layout,
            dtype=vectors.dtype,
            device=vectors.device,
            symmetric=True,
            psd=bool((values >= 0).all()),
            name=f"LowRank({len(values)})",
        )
        self.vectors, self.values = vectors, values

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        inside = self.values.to(vectors)[:, None] * (self.vectors.T.to(vectors) @ vectors)
        return self.vectors.to(vectors) @ inside

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        if rows != columns:
            return Restricted(self, rows, columns)
        return LowRank(self.rows.extract(rows, self.vectors), self.values, rows)

    def _with_names(self, rows: Layout, columns: Layout) -> Operator:
        fits = nameless(self.rows) and rows == columns and rows.size == self.rows.size
        return LowRank(self.vectors, self.values, rows) if fits else self


def compose(left: Operator, right: Any) -> Operator:
    """A @ B."""
    factors = [*_factors(left), *_factors(as_operator(right))]
    # Names pass between neighbouring factors, in both directions.
    for i in reversed(range(len(factors) - 1)):
        beside = factors[i + 1].rows
        factors[i] = factors[i]._with_names(beside, beside)
    for i in range(1, len(factors)):
        beside = factors[i - 1].columns
        factors[i] = factors[i]._with_names(beside, beside)
    return Composed(factors)


class Composed(Operator):
    """A₁ A₂ … A_m. A product takes m products, starting with the last factor."""

    def __init__(self, factors: Sequence[Operator]) -> None:
        for one, other in pairwise(factors):
            if one.shape[1] != other.shape[0]:
                raise CurvlensError(
                    f"{one!r} @ {other!r}: the first has {one.shape[1]} columns, the second {other.shape[0]} rows. "
                    "They must be equal."
                )
            if one.columns != other.rows:
                raise CurvlensError(
                    f"{one!r} @ {other!r}: the columns of the first and the rows of the second are different "
                    "parameters."
                )
        middle, odd = len(factors) // 2, len(factors) % 2
        mirrored = all(_transposes(one, other) for one, other in zip(factors[:middle], factors[::-1], strict=False))
        main = next((f for f in factors if not isinstance(f, Diagonal)), factors[0])
        super().__init__(
            factors[0].rows,
            factors[-1].columns,
            dtype=main.dtype,
            device=main.device,
            symmetric=mirrored and (not odd or factors[middle].symmetric),
            psd=mirrored and (not odd or factors[middle].psd),
            name=" @ ".join(f.name for f in factors),
        )
        self.factors = tuple(factors)

    @property
    def precision(self) -> torch.dtype:
        """The precision of the least precise factor. A diagonal is as precise as the vectors."""
        found = [f.precision for f in self.factors if not isinstance(f, Diagonal)] or [self.dtype]
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        for factor in reversed(self.factors):
            vectors = factor._apply(vectors.to(factor.device, self._between(factor)), progress)
        return vectors.to(self.device, self.dtype)

    def _between(self, factor: Operator) -> torch.dtype:
        return self.dtype if isinstance(factor, Diagonal) else factor.dtype

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        others = [i for i, f in enumerate(self.factors) if not isinstance(f, Diagonal)]
        if len(others) != 1:
            return Restricted(self, rows, columns)
        # A diagonal acts within each block, so the block of D A D needs only the block of A.
        at = others[0]
        left, right = self.factors[:at], self.factors[at + 1 :]
        return Composed(
            [
                *(f._block(rows, rows) for f in left),
                self.factors[at]._block(rows, columns),
                *(f._block(columns, columns) for f in right),
            ]
        )

    def _transposed(self) -> Operator:
        return Composed([f.T for f in reversed(self.factors)])


def _factors(operator: Operator) -> tuple[Operator, ...]:
    return operator.factors if isinstance(operator, Composed) else (operator,)


def _transposes(one: Operator, other: Operator) -> bool:
    """Whether one operator is known to be the transpose of the other."""
    if isinstance(one, Diagonal) and isinstance(other, Diagonal):
        return one.values is other.values or bool(torch.equal(one.values, other.values))
    return (one is other and one.symmetric) or one.transpose_of is other or other.transpose_of is one
