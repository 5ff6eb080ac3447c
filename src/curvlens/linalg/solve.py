"""Linear systems (A + damping) x = b: conjugate gradients if A is positive semidefinite, otherwise MINRES.

Scalars are in float64. The reported residual comes from a product with the solution, not from the recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import require_real
from curvlens.errors import CurvlensError
from curvlens.interrupts import must_be_whole
from curvlens.linalg.counted import CountedOperator, warn, whole
from curvlens.linalg.vectors import dot, norm
from curvlens.operators.base import Progress
from curvlens.results import Solution, Status
from curvlens.surroundings import as_found

Method = Literal["cg", "minres"]
PATIENCE, LONGEST = 100, 1000
"""The search stops after this many steps without one percent of progress: the number of unknowns, but at least 100 and
at most 1,000. A nonsingular system may stand still for so long and then converge."""

REACH = 0.8
"""MINRES ends at ‖A r‖ ≤ eps^REACH ‖A‖ ‖r‖, 3e-13 in float64. Within the precision of products the rest of b then lies
in the kernel, and x solves the least-squares problem. With more steps, x would grow along the kernel by 1/eps."""

INCONSISTENT = (
    "the system is inconsistent, b has a part outside the range of A + damping: x is a least-squares solution"
)

Apply = Callable[[Tensor], Tensor]


@as_found
def solve(
    operator: Any,
    b: Any,
    *,
    damping: float = 0.0,
    rtol: float | None = None,
    max_products: int | None = None,
    method: Method | None = None,
    start: Any = None,
    progress: Progress | None = None,
) -> Solution:
    """x with ‖b − (A + damping) x‖ ≤ rtol ‖b‖ (1e-8 in float64, 1e-4 in float32).

    b is a flat vector, an array or a dict by parameter name; ``.x`` has its format. ``method`` is ``"cg"`` for
    an operator that is tagged positive semidefinite, and ``"minres"``, which takes indefinite ones, for all others.
    After Ctrl-C, or ``max_products`` products, the result is the solution so far. If A + damping is singular and b is
    outside its range, MINRES ends at a least-squares solution; ``status`` is then ``"inconsistent"``.

    >>> solve(torch.diag(torch.tensor([2.0, -4.0], dtype=torch.float64)), torch.tensor([1.0, 1.0])).x
    tensor([ 0.5000, -0.2500], dtype=torch.float64)
    """
    products = CountedOperator(operator, symmetric=True, progress=progress)
    if rtol is not None and not 0 < rtol < 1:
        raise CurvlensError(f"rtol={rtol}, expected a number between 0 and 1.")
    if not math.isfinite(damping):
        raise CurvlensError(f"damping={damping}, expected a finite number.")
    if method not in ("cg", "minres", None):
        raise CurvlensError(f"method={method!r}, expected 'cg' or 'minres'.")
    if max_products is not None and not (whole(max_products) and max_products >= 1):
        raise CurvlensError(f"max_products={max_products!r}, expected a whole number, 1 or more.")
    if rtol is None:
        rtol = {torch.float64: 1e-8, torch.float32: 1e-4}.get(products.operator.dtype, 5e-2)
    limit = max_products or 2000
    patience = max(PATIENCE, min(products.n, LONGEST))
    method = method or ("cg" if products.operator.psd and damping >= 0 else "minres")
    rhs = _vector(products, b, "b")
    x = torch.zeros_like(rhs) if start is None else _vector(products, start, "start")

    def product(v: Tensor) -> Tensor:
        return products(v) + damping * v

    # Scale b to size 1, whatever its units: squares of tiny numbers are 0.
    unit = float(rhs.abs().max()) or 1.0
    rhs, x = rhs / unit, x / unit
    size, history = norm(rhs), list[float]()
    status, note = Status.CONVERGED, ""
    best, best_x, length, found, mark, largest = math.inf, x.clone(), 0.0, 0, math.inf, 0.0
    eps = float(torch.finfo(rhs.dtype).eps)
    if size:
        r = rhs if start is None else rhs - product(x)
        steps = _conjugate_gradients(product, x, r) if method == "cg" else _minres(product, x, r)
        try:
            for residual, largest in steps:
                # x is so large along the kernel that the rounding of A x exceeds the rest of b.
                grown = norm(x)
                if eps * largest * grown > 0.1 * max(residual, 0.1 * size):
                    status, note = Status.INCONSISTENT, INCONSISTENT
                    break
                history.append(residual / size)
                if history[-1] < 0.99 * mark:
                    mark, found = history[-1], len(history)
                # Progress below one percent may be a drift along the kernel: x grows without solving anything.
                if history[-1] < 0.99 * best or (history[-1] < best and grown <= 1.1 * length):
                    best, length = history[-1], grown
                    best_x.copy_(x)
                if history[-1] <= max(0.9 * rtol, products.eps):  # below rounding the recurrence is not reliable
                    best_x.copy_(x)
                    break
                if len(history) - found > patience or not history[-1] < 1e6 * max(best, 1):
                    note = "the residual no longer falls: rounding, or b has a part outside the range of A + damping"
                    status = Status.STALLED
                    break
                if products.count >= limit - 1:
                    status, note = Status.STOPPED_AT_BUDGET, f"stopped at max_products={limit}"
                    break
            else:
                status, note = Status.INCONSISTENT, INCONSISTENT
                if history[-1] <= best:
                    best_x.copy_(x)
        except KeyboardInterrupt:
            if must_be_whole():
                raise
            status, note = Status.INTERRUPTED, f"interrupted after {products.count} products"
        except _NegativeCurvatureError:
            status = Status.NEGATIVE_CURVATURE
            note = "a direction has no positive curvature, so cg does not apply: use method='minres' or more damping"
    x = best_x if size else torch.zeros_like(x)
    residual = norm(rhs - product(x)) / size if size else 0.0
    if size and residual > max(0.99 * history[0], 1.01 * min(history)):
        # b lies in the kernel: its product is only rounding, and the recurrence divides by it.
        x = torch.zeros_like(x) if start is None else _vector(products, start, "start") / unit
        residual, status = history[0], Status.INCONSISTENT
        note = "A + damping is singular to rounding, and no step reduced the residual: x is the start; use more damping"
    converged = residual <= rtol
    if status is Status.INCONSISTENT and not converged and largest:
        try:
            seen = _least_squares(product, x, rhs, largest, lambda: products.count >= limit - 2)
        except KeyboardInterrupt:
            if must_be_whole():
                raise
            seen, status, note = 0.0, Status.INTERRUPTED, f"interrupted after {products.count} products"
        residual = norm(rhs - product(x)) / size
        converged = residual <= rtol
        if seen > 1e-3:
            status = Status.STALLED
            note = (
                f"A + damping is singular to rounding, and x is not a least-squares solution: ‖A r‖ = {seen:.0e} ‖A‖ "
                "‖r‖"
            )
    if converged:
        status = Status.CONVERGED
    else:
        if status is Status.CONVERGED:
            status, note = Status.STALLED, f"rounding of products: the recurrence said {history[-1]:.0e}"
        warn(f"The system was solved to a residual of {residual:.1e}, not to rtol={rtol:g}: {note}.")
    return Solution(
        x=_like(products, x * unit, b),
        residual=residual,
        status=status,
        note=note,
        products=products.count,
        method=method,
        damping=float(damping),
        history=history,
        provenance=products.provenance(rtol=rtol),
    )


class _NegativeCurvatureError(Exception):
    """pᵀ A p ≤ 0."""


def _conjugate_gradients(product: Apply, x: Tensor, r: Tensor) -> Iterator[tuple[float, float]]:
    """Hestenes and Stiefel. x changes in place; each step yields the norm of the residual and 0.

    `_minres` yields a lower bound of ‖A‖ there, from its tridiagonal matrix, which is not formed here.
    """
    r, p = r.clone(), r.clone()
    square = dot(r, r)
    yield math.sqrt(square), 0.0
    while square > 0:
        Ap = product(p)
        curvature = dot(p, Ap)
        if curvature <= 0:
            raise _NegativeCurvatureError
        step = square / curvature
        x += step * p
        r -= step * Ap
        square, before = dot(r, r), square
        yield math.sqrt(square), 0.0
        p = r + (square / before) * p


def _least_squares(product: Apply, x: Tensor, b: Tensor, largest: float, spent: Callable[[], bool]) -> float:
    """Improve x, in place, until A r = 0 for the rest r = b − A x. Return ‖A r‖ / (‖A‖ ‖r‖).

    Conjugate gradients for A² x = A b. All steps lie in the range of A, so x does not grow along the kernel.
    """
    enough = math.sqrt(torch.finfo(b.dtype).eps)
    r = b - product(x)
    s = product(r)
    p, square, steps = s.clone(), dot(s, s), 0
    best, best_x = math.sqrt(square) / (largest * norm(r)), x.clone()
    while best > enough and not spent() and steps < PATIENCE:
        q = product(p)
        curvature = dot(q, q)
        if not curvature:
            break
        x += (square / curvature) * p
        r -= (square / curvature) * q
        s = product(r)
        square, before = dot(s, s), square
        p = s + (square / before) * p
        steps += 1
        if math.sqrt(square) < best * largest * norm(r):
            steps = 0 if math.sqrt(square) < 0.5 * best * largest * norm(r) else steps
            best = math.sqrt(square) / (largest * norm(r))
            best_x.copy_(x)
    x.copy_(best_x)
    return best


def _minres(product: Apply, x: Tensor, r: Tensor) -> Iterator[tuple[float, float]]:
    """Paige and Saunders: the smallest residual over the Krylov space, by rotations of the tridiagonal matrix."""
    residual = norm(r)
    yield residual, 0.0
    v, v_old = r / residual, torch.zeros_like(r)
    d, d_old = torch.zeros_like(r), torch.zeros_like(r)
    beta, c, s, delta, epsilon = 0.0, -1.0, 0.0, 0.0, 0.0
    eps = float(torch.finfo(r.dtype).eps)
    tiny, scale = 10 * eps, 0.0
    while True:
        w = product(v)
        alpha = dot(v, w)
        w = w - alpha * v - beta * v_old
        beta = norm(w)
        scale = max(scale, abs(alpha), beta)
        upper, pivot = c * delta + s * alpha, s * delta - c * alpha
        delta, beyond = -c * beta, s * beta
        gamma = math.hypot(pivot, beta)
        # ‖A r‖/‖r‖ of the residual so far (Paige and Saunders 1975): if 0, the rest of b is outside the range of A.
        if min(math.hypot(pivot, delta), gamma) <= eps**REACH * scale:
            return
        c, s = pivot / gamma, beta / gamma
        d, d_old = (v - upper * d - epsilon * d_old) / gamma, d
        x += c * residual * d
        residual *= s
        yield residual, scale
        if beta <= tiny * scale:
            return
        v, v_old, epsilon = w / beta, v, beyond


def _vector(products: CountedOperator, b: Any, name: str) -> Tensor:
    """A right-hand side (tensor, array or dict) as a flat vector in the working dtype."""
    if isinstance(b, Mapping):
        v = products.operator.columns.flatten(b, dtype=products.dtype, device=products.device)
    else:
        v = torch.as_tensor(b).detach()
        require_real(v)
        v = v.to(device=products.device, dtype=products.dtype, copy=True)
    if v.shape != (products.n,):
        raise CurvlensError(f"{name} has shape {tuple(v.shape)}, expected a vector of {products.n} numbers.")
    if not bool(torch.isfinite(v).all()):
        raise CurvlensError(f"{name} has entries that are NaN or infinite.")
    return v


def _like(products: CountedOperator, x: Tensor, b: Any) -> Any:
    if isinstance(b, Mapping):
        return products.operator.columns.unflatten(x)
    return x.cpu().numpy() if isinstance(b, np.ndarray) else x
