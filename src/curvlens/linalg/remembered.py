"""An operator that remembers its products, so that trace and norm come from the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.operators import Operator
from curvlens.operators.algebra import Restricted
from curvlens.operators.base import Progress


class Remembered(Operator):
    """A, with the products of the last ``most`` single vectors kept.

    Estimators with one seed draw the same probes: the second of them finds its products here. Beyond ``most`` vectors,
    and for several vectors at a time, products are computed as usual.
    """

    def __init__(self, inner: Operator, most: int) -> None:
        super().__init__(
            inner.rows,
            inner.columns,
            dtype=inner.dtype,
            device=inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd,
            name=inner.name,
        )
        self._inner, self._most = inner, most
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.products = 0
        """Products that were computed."""

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        if vectors.ndim == 2 and vectors.shape[1] != 1:
            self.products += vectors.shape[1]
            several: Tensor = self._inner.apply(vectors, progress)
            return several
        for given, known in self._kept:
            if torch.equal(given, vectors):
                return known.clone()
        self.products += 1
        result: Tensor = self._inner.apply(vectors, progress)
        if len(self._kept) < self._most:
            self._kept.append((vectors.clone(), result.clone()))
        return result

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)
