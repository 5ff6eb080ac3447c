"""`check_operator`: tests that an operator, yours or ours, keeps the rules of operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.operators import Operator, as_operator

__all__ = ["check_operator"]

ROUNDING = 100
"""Allowed difference of two computations of the same number, in units of eps · √n."""


def check_operator(operator: Any, *, seed: int = 0) -> None:
    """Raise an `AssertionError` that names the first rule an operator breaks. It takes about eight products.

    The rules: products are linear, finite, repeatable, and of the right shape, dtype and device. They do not change
    their argument. A matrix of columns, an array and a dict by name give the same numbers as single vectors. Aᵀ is the
    transpose. The tags ``symmetric`` and ``psd`` are true if set. A block equals the part of the whole.

    >>> check_operator(torch.eye(3, dtype=torch.float64))
    >>> A = as_operator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> A.symmetric = True
    >>> check_operator(A)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: Tensor(2 × 2, float32, symmetric) says symmetric, but ⟨u, A v⟩ = ... and ⟨v, A u⟩ = ...
    """
    A = as_operator(operator)
    generator = torch.Generator().manual_seed(seed)
    u, v, w = (_vector(A, generator) for _ in range(3))
    Av = _product(A, v)
    size = float(Av.double().norm())
    _same(A, "gives different results for the same vector", A.apply(v), Av, size)
    Aw = _product(A, w)
    both = max(size, float(Aw.double().norm()))
    _same(A, "is not linear: A(2v − 3w)", _product(A, 2 * v - 3 * w), 2 * Av - 3 * Aw, 5 * both)
    matrix = A.apply(torch.stack([v, w], dim=1))
    _require(A, matrix.shape == (A.shape[0], 2), f"maps two columns to shape {tuple(matrix.shape)}")
    _same(A, "differs for a matrix of columns", matrix, torch.stack([Av, Aw], dim=1), both)
    array = A.apply(v.to(torch.promote_types(v.dtype, torch.float32)).cpu().numpy())
    _require(A, isinstance(array, np.ndarray), f"maps an array to {type(array).__name__}")
    _same(A, "differs for an array", torch.from_numpy(array).to(Av), Av, size)
    named = A.apply(A.columns.unflatten(v))
    _same(A, "differs for a dict by name", A.rows.flatten(named, dtype=A.dtype, device=A.device), Av, size)
    _check_tags(A, u, v, Av)
    _check_transpose(A, v, Av, generator)
    _check_blocks(A, v, Av)


def _vector(A: Operator, generator: torch.Generator, rows: bool = False) -> Tensor:
    n = A.shape[0 if rows else 1]
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    return (x / max(float(x.norm()), 1e-300)).to(A.device, A.dtype)


def _product(A: Operator, v: Tensor) -> Tensor:
    given = v.clone()
    result = A.apply(given)
    _require(A, bool(torch.equal(given, v)), "writes into its argument")
    _require(A, isinstance(result, Tensor), f"maps a tensor to {type(result).__name__}")
    _require(A, result.shape == (A.shape[0],), f"maps a vector to shape {tuple(result.shape)}")
    _require(A, result.dtype == A.dtype, f"has dtype {A.dtype}, but returns {result.dtype}")
    _require(A, result.device.type == A.device.type, f"has device {A.device}, but returns {result.device}")
    _require(A, bool(result.isfinite().all()), "returns NaN or infinite entries")
    found: Tensor = result
    return found


def _check_transpose(A: Operator, v: Tensor, Av: Tensor, generator: torch.Generator) -> None:
    left = _vector(A, generator, rows=True)
    pulled = _product(A.T, left)
    one, other = _dot(left, Av), _dot(pulled, v)
    _require(
        A,
        abs(one - other) <= _allowed(A) * max(float(Av.double().norm()), float(pulled.double().norm())),
        f"has a wrong transpose: ⟨u, A v⟩ = {one:.9g}, but ⟨Aᵀ u, v⟩ = {other:.9g}",
    )


def _check_tags(A: Operator, u: Tensor, v: Tensor, Av: Tensor) -> None:
    if A.symmetric or A.psd:
        _require(A, A.rows == A.columns, "says symmetric, but its rows and columns have different layouts")
        Au = _product(A, u)
        one, other = _dot(u, Av), _dot(v, Au)
        size = max(float(Au.double().norm()), float(Av.double().norm()))
        _require(
            A,
            abs(one - other) <= _allowed(A) * size,
            f"says symmetric, but ⟨u, A v⟩ = {one:.9g} and ⟨v, A u⟩ = {other:.9g}",
        )
    if A.psd:
        form = _dot(v, Av)
        _require(A, form >= -_allowed(A) * float(Av.double().norm()), f"says psd, but ⟨v, A v⟩ = {form:.9g}")


def _check_blocks(A: Operator, v: Tensor, Av: Tensor) -> None:
    """A product with a block equals a product of the whole with a vector that is zero elsewhere."""
    if A.rows != A.columns or len(A.rows.blocks) < 2:
        return
    names = list(A.rows.blocks)
    first, last = A.rows.select(names[0]), A.columns.select(names[-1])
    inner = A.columns.extract(last, v)
    whole = A.apply(A.columns.embed(last, inner[:, None])[:, 0])
    block = A[names[0], names[-1]].apply(inner)
    _same(
        A,
        f"differs from its block [{names[0]!r}, {names[-1]!r}]",
        block,
        A.rows.extract(first, whole),
        float(Av.double().norm()),
    )


def _dot(x: Tensor, y: Tensor) -> float:
    return float(x.double() @ y.double())


def _allowed(A: Operator) -> float:
    return float(min(ROUNDING * torch.finfo(A.precision).eps * max(A.shape) ** 0.5, 0.1))


def _same(A: Operator, what: str, found: Tensor, wanted: Tensor, size: float) -> None:
    error = float((found.double() - wanted.double()).norm())
    _require(A, error <= _allowed(A) * size, f"{what}: the difference is {error:.1e}, the size {size:.1e}")


def _require(A: Operator, holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(f"{A!r} {text}")
