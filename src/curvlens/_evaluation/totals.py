"""Sums of vectors over the pieces of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens._evaluation.reducer import Reducer
from curvlens.blocks import Layout


class Total:
    """A sum over pieces: in float64 from the second term on. A single term is not copied.

    Terms are given by parameter name; a missing name means zeros.
    """

    def __init__(self, rows: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.dtype, self.device = rows, dtype, device
        self._first: dict[str, Tensor] | None = None
        self._sum: Tensor | None = None

    def add(self, parts: dict[str, Tensor]) -> None:
        """Add the terms of one piece."""
        if self._first is None and self._sum is None:
            self._first = {name: part.detach() for name, part in parts.items()}
            return
        if self._sum is None:
            self._sum = self._written(self._first or {}, 1.0, dtype=torch.float64)
            self._first = None
        for name, part in parts.items():
            self._sum[self.rows.slices[name]] += part.detach().reshape(-1)

    def reduce(self, reducer: Reducer) -> None:
        """Add the sums of the other processes, in float64."""
        if not reducer.alone:
            own = self._written(self._first or {}, 1.0, dtype=torch.float64) if self._sum is None else self._sum
            self._first, self._sum = None, reducer.tensor(own)

    def parts(self) -> dict[str, Tensor]:
        """The sum, by parameter and without a copy."""
        return self._first or {} if self._sum is None else self.rows.unflatten(self._sum)

    def over(self, count: float) -> Tensor:
        """The sum divided by ``count``, in the dtype of the parameters. This consumes the sum, to avoid a copy."""
        if self._sum is not None:
            return self._sum.div_(count).to(self.dtype)
        return self._written(self._first or {}, count, dtype=self.dtype)

    def rounded_once(self, count: float) -> Tensor:
        """As `over`, but divided in float64 and then rounded. A single term is divided one parameter at a time."""
        if self._sum is not None or self.dtype == torch.float64:
            return self.over(count)
        result = torch.zeros(self.rows.size, dtype=self.dtype, device=self.device)
        parts = self._first or {}
        for name in list(parts):
            result[self.rows.slices[name]] = parts.pop(name).reshape(-1).double().div_(count)
        return result

    def _written(self, parts: dict[str, Tensor], count: float, dtype: torch.dtype) -> Tensor:
        """The terms divided by ``count``, in one flat vector. Each number is read and written once; each term is
        freed after it is written.
        """
        result = torch.empty(self.rows.size, dtype=dtype, device=self.device)
        for name, place in self.rows.slices.items():
            if name in parts:
                torch.div(parts.pop(name).reshape(-1).to(dtype), count, out=result[place])
            else:
                result[place] = 0
        return result
