"""The checked request for eigenvalues, and the memory that the search takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import require_real
from curvlens.errors import CurvlensError, a_kind
from curvlens.linalg.basis import BasisPlace
from curvlens.linalg.counted import CountedOperator, whole
from curvlens.linalg.needs import Needs
from curvlens.linalg.vectors import LONG
from curvlens.results import Eigs

Ends = Literal["largest", "smallest", "both", "magnitude"]

ROOMY = 160
"""Basis vectors if memory is plentiful: a restart costs products, a vector only a pass over memory in each step."""
FEW = 6
"""The same for `LONG` vectors: each costs a pass over memory in every step, and with 128 tokens 80 of them take as long
as a product. For one eigenvalue, restarts with 6 vectors cost no more products in most spectra."""
SMALL = 1000
"""Up to this size the basis may span the whole space. Then every search ends."""


@dataclass(frozen=True)
class Plan:
    """The request as numbers."""

    k: int
    ends: Ends
    count: int
    """The number of eigenvalues returned."""
    tol: float
    max_products: int
    capacity: int
    dtype: torch.dtype
    memory: int

    def wanted(self, theta: Tensor, count: int | None = None) -> Tensor:
        """Indices of the wanted among ascending values; ``count`` of them, split between both ends."""
        n = len(theta)
        count = min(self.count if count is None else count, n)
        if self.ends == "magnitude":
            return theta.abs().argsort(descending=True)[:count].sort().values
        low = {"largest": 0, "smallest": count, "both": count // 2}[self.ends]
        return torch.cat([torch.arange(low), torch.arange(n - (count - low), n)])


def plan_search(
    products: CountedOperator,
    k: int,
    ends: Ends,
    tol: float | None,
    max_products: int | None,
    memory: int | float | str | None,
    store: BasisPlace,
    store_dtype: torch.dtype | None,
) -> Plan:
    """Check the request, and find a basis that fits the memory."""
    n = products.n
    if ends not in get_args(Ends):
        raise CurvlensError(f"ends={ends!r}, expected one of {', '.join(map(repr, get_args(Ends)))}.")
    if not whole(k) or k < 1:
        raise CurvlensError(f"k={k!r}, expected a whole number of eigenvalues, 1 or more.")
    k = int(k)
    if k > n:
        raise CurvlensError(f"k={k} eigenvalues asked of {products.operator!r}, which has {n}. Give k={n} or less.")
    if tol is not None and not (isinstance(tol, (int, float)) and 0 < tol < 1):
        raise CurvlensError(
            f"tol={tol}, expected a number between 0 and 1, the residual relative to the spectral norm."
        )
    if max_products is not None and not (whole(max_products) and max_products >= 1):
        raise CurvlensError(f"max_products={max_products!r}, expected a whole number, 1 or more.")
    dtype = products.dtype if store_dtype is None else store_dtype
    if not dtype.is_floating_point:
        raise CurvlensError(f"store_dtype={dtype}, expected a floating-point type such as torch.bfloat16.")
    count = min(2 * k if ends == "both" else k, n)
    needs = Needs.of(products, count, 2 if ends in ("both", "magnitude") else 1, dtype, store)
    roomy = n if n <= SMALL else ROOMY if n <= LONG else FEW
    capacity = needs.capacity(memory, store, max(roomy, count + FEW - 1, 3 * count))
    if tol is None:
        lowest = max(products.eps, float(torch.finfo(dtype).eps))
        tol = 1e-8 if lowest < 1e-15 else 1e-5 if lowest < 1e-6 else 2e-2
    limit = max(1000, 10 * capacity) if max_products is None else max_products
    needs.announce(capacity)
    return Plan(k, ends, count, tol, limit, capacity, dtype, needs.total(capacity))


def start_vector(start: Tensor | np.ndarray | Eigs | None, products: CountedOperator) -> Tensor | None:
    """One start vector. The sum of the given vectors spans all of them after as many steps."""
    if start is None:
        return None
    vectors = start.vectors if isinstance(start, Eigs) else start
    vectors = torch.from_numpy(vectors) if isinstance(vectors, np.ndarray) else vectors
    if not isinstance(vectors, Tensor) or vectors.ndim not in (1, 2) or vectors.shape[0] != products.n:
        given = f"shape {tuple(vectors.shape)}" if isinstance(vectors, Tensor) else a_kind(vectors)
        raise CurvlensError(f"start is {given}, expected a vector or columns of {products.n} numbers, or an Eigs.")
    require_real(vectors)
    v = vectors.to(products.device, torch.float64)
    v = v if v.ndim == 1 else v.sum(1)
    if not bool(torch.isfinite(v).all()):
        raise CurvlensError("start has entries that are NaN or infinite.")
    return v.to(products.dtype)
