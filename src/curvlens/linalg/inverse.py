"""The inverse as an operator: each product solves a linear system and checks its residual."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, CurvlensWarning
from curvlens.linalg.solve import solve
from curvlens.operators.algebra import Restricted
from curvlens.operators.base import Operator, Progress
from curvlens.results import Status


class Inverse(Operator):
    """(A + damping)⁻¹ of a symmetric A, to the ``rtol`` of `solve`. An unsolved system raises an error."""

    def __init__(self, inner: Operator, damping: float, options: Mapping[str, Any]) -> None:
        taken = {"rtol", "max_products", "method"}
        unknown = set(options) - taken
        if unknown:
            raise CurvlensError(
                f"inverse() has no option {unknown.pop()!r}; its options are damping, {', '.join(sorted(taken))}."
            )
        if not isinstance(damping, (int, float, np.integer, np.floating, Tensor)) or not math.isfinite(damping):
            raise CurvlensError(f"damping={damping!r:.40}, expected a finite number, as damping=1e-3.")
        if inner.rows != inner.columns:
            raise CurvlensError(f"{inner!r} has no inverse: its rows and columns are different parameters.")
        super().__init__(
            inner.rows,
            inner.rows,
            dtype=inner.dtype,
            device=inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd and damping >= 0,
            name=f"inverse of ({inner.name} + {damping:g})" if damping else f"inverse of {inner.name}",
        )
        self.inner, self.damping, self.options = inner, damping, dict(options)

    @property
    def precision(self) -> torch.dtype:
        """The precision of A."""
        return self.inner.precision

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        if not vectors.shape[1]:
            return torch.empty_like(vectors)
        return torch.stack([self._solved(v, progress) for v in vectors.T], dim=1)

    def _solved(self, v: Tensor, progress: Progress | None) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvlensWarning)  # raised as an error below
            found = solve(self.inner, v, damping=self.damping, progress=progress, **self.options)
        if found.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        if not found.converged:
            raise CurvlensError(
                f"{self!r}: a system was only solved to a residual of {found.residual:.1e} after {found.products} "
                f"products: {found.note}. Use more damping, {self.inner.name}.inverse(damping=1e-2), a larger rtol=, "
                "or a larger max_products=."
            )
        x: Tensor = found.x
        return x

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)
