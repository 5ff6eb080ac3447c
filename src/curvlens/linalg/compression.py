"""Trace and norm of an operator with known eigenpairs: their part is exact, only the rest is sampled.

With X the orthonormal vectors, Λ = Xᵀ A X diagonal, residuals r_j = A x_j − λ_j x_j ⊥ X and P = 1 − X Xᵀ
(`docs/explanation/math.md`, "Deflated estimators"),

- tr A = Σ_j λ_j + tr P A P,
- ‖A‖²_F = Σ_j (λ_j² + 2 ‖r_j‖²) + ‖P A P‖²_F,

for any residuals. So an estimate of the norm is never below the part that is known.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from curvlens.blocks import Layout
from curvlens.linalg.estimators import frobenius, trace
from curvlens.operators import Operator
from curvlens.operators.algebra import Restricted
from curvlens.operators.base import Progress
from curvlens.results import Eigs, Estimate


class Compression(Operator):
    """P A P, for P = 1 − X Xᵀ."""

    def __init__(self, inner: Operator, X: Tensor) -> None:
        super().__init__(
            inner.rows,
            inner.columns,
            dtype=inner.dtype,
            device=inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd,
            name=f"{inner.name} beside {X.shape[1]} eigenvectors",
        )
        self._inner, self._X = inner, X.double()

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        return self._project(self._inner.apply(self._project(vectors), progress))

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)

    def _project(self, v: Tensor) -> Tensor:
        """P v. Projected twice: the rounding error of one projection would be multiplied by a large eigenvalue."""
        w = v.double()
        for _ in range(2):
            w = w - self._X @ (self._X.T @ w)
        return w.to(v.dtype)


def trace_and_norm(operator: Operator, known: Eigs, samples: int, seed: int) -> tuple[Estimate, Estimate]:
    """tr A and ‖A‖_F from ``samples`` products each, with the pairs of `eigs` taken out."""
    rest = Compression(operator, known.vectors)
    values, residuals = known.values.double().cpu(), known.residuals.double().cpu()
    small = trace(rest, samples, seed=seed)
    norm = frobenius(rest, samples, seed=seed)
    square = (values.square() + 2 * residuals.square()).sum()
    size = (square + norm.value.square()).sqrt()
    # the root of a known plus an estimated square; the error is to first order
    stderr = norm.stderr * norm.value / size.clamp(min=1e-300)
    return (
        dataclasses.replace(small, value=small.value + values.sum()),
        dataclasses.replace(norm, value=size, stderr=stderr),
    )
