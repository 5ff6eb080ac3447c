"""Counts and validates products with an operator, and protects vectors from operators that write into them."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.errors import CurvlensError, CurvlensWarning, a_kind
from curvlens.linalg.probes import Probes
from curvlens.linalg.vectors import dot, norm
from curvlens.operators import Operator, as_operator
from curvlens.operators.base import Progress
from curvlens.study.budget import readable_time

logger = logging.getLogger("curvlens")


LARGEST = 1e140
"""Entries larger than this, or smaller than its inverse, raise an error."""

EPS32 = float(torch.finfo(torch.float32).eps)

_PACKAGE = str(Path(__file__).parent.parent)


class CountedOperator:
    """``products(v)`` is A v in the working dtype: float64 for a float64 operator, else float32."""

    def __init__(self, operator: Any, *, symmetric: bool, progress: Progress | None = None, seed: int = 0) -> None:
        self.operator: Operator = as_operator(operator)
        if self.operator.shape[0] != self.operator.shape[1] or not self.operator.shape[0]:
            raise CurvlensError(
                f"Expected a square operator with at least one row, got {self.operator!r}. A square block is H[name]."
            )
        self.n = self.operator.shape[0]
        self.dtype = torch.float64 if self.operator.dtype == torch.float64 else torch.float32
        self.device = self.operator.device
        self._ours = type(self.operator).__module__.split(".")[0] == "curvlens"
        self.count = 0
        self._began: float | None = None
        self._untimed, self._timed = 0, False
        self.total: int | None = None
        self.progress = progress
        if self.operator.precision != torch.float64:
            say_precision(self.operator.precision)
        if symmetric and not self.operator.symmetric:
            self._check_symmetry(seed)

    @property
    def eps(self) -> float:
        """The smallest relative rounding error that a product can have."""
        return float(torch.finfo(self.operator.precision).eps)

    def probes(self, seed: int) -> Probes:
        """Random vectors for this operator."""
        return Probes(self.n, seed, dtype=self.dtype, device=self.device)

    def __call__(self, v: Tensor) -> Tensor:
        """One product, checked."""
        # Copy in and out: a foreign operator may write into its argument, or return a buffer that it uses again. Ours
        # do not; `Wrapped` makes these copies for foreign operators inside ours.
        given = v.to(self.operator.dtype, copy=not self._ours)
        result = self.operator.apply(given)
        if not isinstance(result, Tensor) or result.shape != v.shape:
            shape = tuple(result.shape) if isinstance(result, Tensor) else a_kind(result)
            raise CurvlensError(
                f"A product of {self.operator!r} with a vector of {self.n} numbers gave {shape}, expected shape "
                f"({self.n},)."
            )
        result = result.detach()
        self._check_entries(result)
        self.tick()
        copy = not self._ours or result.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        return result.to(device=self.device, dtype=self.dtype, copy=copy)

    def columns(self) -> Iterator[Tensor]:
        """A e_i for every i: the matrix, column by column."""
        self.total = self.count + self.n
        for i in range(self.n):
            e = torch.zeros(self.n, dtype=self.dtype, device=self.device)
            e[i] = 1
            yield self(e)

    def tick(self, more: int = 1) -> None:
        """Count products and report progress. Log the remaining time once a product has been timed."""
        self.count += more
        if self.count and self._began is None:
            self._began, self._untimed = time.perf_counter(), self.count  # not timed: the first product builds graphs
        elif self._began is not None and not self._timed and self.count > self._untimed:
            self._timed = True
            each = (time.perf_counter() - self._began) / (self.count - self._untimed)
            left = "" if self.total is None else f", about {readable_time(each * (self.total - self.count))} left"
            logger.info("%s: %.3g s a product%s", self.operator.name, each, left)
        if self.progress is not None:
            self.progress(self.count, self.total)

    def _check_entries(self, result: Tensor) -> None:
        """Check that all entries are finite, and that their squares are neither 0 nor infinite."""
        low, high = (float(x) for x in torch.aminmax(result))
        size = max(abs(low), abs(high))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise self._not_finite(result)
        if size > LARGEST or (self.count == 0 and 0 < size < 1 / LARGEST):
            raise CurvlensError(
                f"Product {self.count + 1} of {self.operator!r} has entries of size {size:.0e}: their squares leave "
                f"the range of float64. Scale the operator, {1 / size:.0e} * H, and scale the results back."
            )

    def _not_finite(self, result: Tensor) -> CurvlensError:
        bad = (~torch.isfinite(result)).nonzero()[:, 0]
        first = int(bad[0])
        name = next((k for k, part in self.operator.rows.slices.items() if part.start <= first < part.stop), "?")
        return CurvlensError(
            f"Product {self.count + 1} of {self.operator!r} has {len(bad)} entries that are NaN or infinite, the first "
            f"at {first} (in {name!r}). Check the loss and these parameters; in half precision use model.float()."
        )

    def _check_symmetry(self, seed: int) -> None:
        """⟨u, A v⟩ = ⟨v, A u⟩ for two random directions; two products."""
        probes = self.probes(seed)
        u, v = probes.direction(0), probes.direction(1)
        Au, Av = self(u), self(v)
        one, other = dot(u, Av), dot(v, Au)
        # For random unit vectors a bilinear form has size ‖A v‖/√n, and its rounding error is eps times that.
        size = (norm(Au) + norm(Av)) / self.n**0.5
        off = abs(one - other)
        if off <= _asymmetry(self.eps, self.n) * size:
            return
        values = f"⟨u, A v⟩ = {one:.9g} and ⟨v, A u⟩ = {other:.9g} for random u, v"
        if off <= _asymmetry(EPS32, self.n) * size:  # the operator's dtype is float64
            rounded = all(torch.equal(w, w.float().double()) for w in (Au, Av))
            seems = "its products are float32 numbers" if rounded else "as if its products were computed in float32"
            raise CurvlensError(
                f"{self.operator!r} is symmetric to float32 only: {values}, {off / size:.0e} of their size; {seems}. "
                'If it computes in float32, set operator.dtype = "float32", or compute its products in float64. If A '
                "itself is slightly unsymmetric, use (A + A.T) / 2."
            )
        raise CurvlensError(
            f"{self.operator!r} is not symmetric: {values}. Eigenvalues, densities and solutions need a symmetric "
            "operator. Use (A + A.T) / 2."
        )

    def provenance(self, **more: Any) -> dict[str, Any]:
        """A description of operator and products, for the record of a result."""
        return {**self.operator.provenance(), **more, "versions": versions()}


def versions() -> dict[str, str]:
    """What a result was computed with."""
    found = {name: version(name) for name in ("curvlens", "torch", "numpy", "scipy")}
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    return found


@cache
def say_precision(dtype: torch.dtype) -> None:
    """Warn about low precision, once per process and dtype."""
    warn(
        f"The operator is in {str(dtype).removeprefix('torch.')}: its products carry a relative error of "
        f"{torch.finfo(dtype).eps:.0e} or more, which no standard error includes. Scalars are in float64. For "
        "exact work use model.double(), or --dtype float64 in the terminal. (Shown once.)"
    )


def _asymmetry(eps: float, n: int) -> float:
    """The largest difference of ⟨u, A v⟩ and ⟨v, A u⟩ that rounding explains, as a share of ‖A v‖/√n.

    A sum of n rounded terms has a relative error of about √n eps. Half of the digits are always allowed. An operator
    without symmetry has a share of about 1 and never passes.
    """
    return min(max(math.sqrt(eps), 10 * eps * math.sqrt(n)), 0.1)


def whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or numpy's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def warn(text: str, category: type[CurvlensWarning] = CurvlensWarning) -> None:
    """Warn at the line of the user's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
