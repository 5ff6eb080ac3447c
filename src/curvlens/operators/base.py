"""A matrix known by its products: algebra, blocks, conversions.

An operator maps vectors in the order of ``columns`` to vectors in the order of ``rows``. Everything with a ``shape``
and ``@`` (a tensor, a numpy array, a scipy ``LinearOperator``, another library's operator) can stand where an operator
is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError
from curvlens.memory import available_bytes, readable

Progress = Callable[[int, int | None], None]
BlockName = str | Iterable[str]


class Operator:
    """A linear operator on vectors of parameters; subclasses say `_apply` and, if they have blocks, `_block`."""

    def __init__(
        self,
        rows: Layout,
        columns: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        symmetric: bool = False,
        psd: bool = False,
        name: str = "Operator",
    ) -> None:
        self.rows = rows
        self.columns = columns
        self.dtype = dtype
        self.device = device
        self.symmetric = symmetric
        self.psd = psd
        self.name = name

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return (self.rows.size, self.columns.size)

    def __repr__(self) -> str:
        tags = [tag for tag in ("symmetric", "psd") if getattr(self, tag)]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}({self.shape[0]} × {self.shape[1]}, {', '.join([dtype, *tags])})"

    # What a subclass says

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        """(columns, k) → (rows, k)."""
        raise NotImplementedError

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        """The block of some rows and columns."""
        raise CurvlensError(f"{self.name} has no named blocks.")

    def _transposed(self) -> Operator:
        """The transpose; an operator that is not symmetric says it itself."""
        raise CurvlensError(f"{self!r} does not know its transpose.")

    # What a user writes

    def apply(self, v: Any, progress: Progress | None = None) -> Any:
        """The product with a flat vector, a matrix of columns or a dict by parameter name: the same kind back.

        ``progress(done, total)`` is called as the work goes on.
        """
        if isinstance(v, Mapping):
            flat = self.columns.flatten(v, dtype=self.dtype, device=self.device)
            return self.rows.unflatten(self._apply(flat[:, None], progress)[:, 0].contiguous())
        if isinstance(v, np.ndarray):
            return self.apply(torch.from_numpy(v), progress).cpu().numpy()
        if not isinstance(v, Tensor) or v.ndim not in (1, 2) or v.shape[0] != self.columns.size:
            given = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
            raise CurvlensError(
                f"{self!r} takes a vector of {self.columns.size} numbers, a ({self.columns.size}, k) matrix or a dict "
                f"by parameter name, got {given}."
            )
        if v.is_complex():
            raise CurvlensError("The vector is complex, the operator real: apply it to real and imaginary part.")
        v = v.detach().to(device=self.device, dtype=self.dtype)
        result = self._apply(v[:, None] if v.ndim == 1 else v, progress)
        return result[:, 0] if v.ndim == 1 else result

    def __matmul__(self, v: Any) -> Any:
        return self.apply(v)

    def __getitem__(self, key: Any) -> Operator:
        """``H[a]`` is ``H[a, a]``; ``H[a, b]`` takes a vector of block b to block a; a list of names is their union."""
        pair = key if isinstance(key, tuple) else (key, key)
        if len(pair) != 2:
            raise CurvlensError(
                f"A block is H[rows, columns]; {len(pair)} names given. A union is a list: H[['a', 'b']]."
            )
        return self._block(self.rows.select(pair[0]), self.columns.select(pair[1]))

    @property
    def T(self) -> Operator:  # noqa: N802 - as everywhere
        """The transpose."""
        return self if self.symmetric else self._transposed()

    def quadratic(self, v: Any) -> float:
        """vᵀ A v, summed in float64."""
        if self.rows != self.columns:
            raise CurvlensError(f"A quadratic form needs equal rows and columns, this is {self!r}.")
        if isinstance(v, Mapping):
            v = self.columns.flatten(v, dtype=self.dtype, device=self.device)
        v = torch.as_tensor(v)
        if v.ndim != 1:
            raise CurvlensError(f"A quadratic form takes one flat vector, got shape {tuple(v.shape)}.")
        product = self.apply(v)
        return float(v.to(product.device).double() @ product.double())

    def dense(self, progress: Progress | None = None) -> Tensor:
        """The matrix itself, column by column: for small operators."""
        needed = self.shape[0] * self.shape[1] * (self.dtype.itemsize + 8)
        free = available_bytes(self.device)
        if needed > free:
            raise CurvlensError(
                f"{self!r} as a dense matrix needs {readable(needed)}, {readable(free)} are free. Take a block, H[name]."
            )
        return self._apply(torch.eye(self.shape[1], dtype=self.dtype, device=self.device), progress)

    def to_scipy(self) -> sla.LinearOperator:
        """The operator for scipy, on numpy arrays."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32

        def product(of: Operator, x: Any) -> Any:
            columns = torch.from_numpy(np.ascontiguousarray(x).reshape(x.shape[0], -1)).to(of.device, of.dtype)
            return of._apply(columns, None).to(dtype).cpu().numpy().reshape(-1, *x.shape[1:])

        return sla.LinearOperator(
            self.shape,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
            matvec=lambda x: product(self, x),
            matmat=lambda x: product(self, x),
            rmatvec=lambda x: product(self.T, x),
            rmatmat=lambda x: product(self.T, x),
        )

    # Algebra

    def __add__(self, other: Any) -> Operator:
        return Sum(self, 1.0, as_operator(other, like=self), 1.0)

    def __radd__(self, other: Any) -> Operator:
        return self + other

    def __sub__(self, other: Any) -> Operator:
        return Sum(self, 1.0, as_operator(other, like=self), -1.0)

    def __rsub__(self, other: Any) -> Operator:
        return -self + other

    def __mul__(self, factor: Any) -> Operator:
        if isinstance(factor, bool) or not isinstance(factor, (int, float, np.number)) and not _is_scalar(factor):
            raise CurvlensError(f"An operator is scaled by a number, got a {type(factor).__name__}.")
        return Scaled(self, float(factor))

    __rmul__ = __mul__

    def __truediv__(self, factor: float) -> Operator:
        return self * (1 / factor)

    def __neg__(self) -> Operator:
        return self * -1.0

    # numpy must leave `array @ operator` and `number * operator` to us
    __array_ufunc__ = None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


class Scaled(Operator):
    """c A."""

    def __init__(self, inner: Operator, factor: float) -> None:
        super().__init__(
            inner.rows,
            inner.columns,
            dtype=inner.dtype,
            device=inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd and factor >= 0,
            name=f"{factor:g}·{inner.name}",
        )
        self.inner, self.factor = inner, factor

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        return self.inner._apply(vectors, progress) * self.factor

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Scaled(self.inner._block(rows, columns), self.factor)

    def _transposed(self) -> Operator:
        return Scaled(self.inner.T, self.factor)


class Sum(Operator):
    """a A + b B."""

    def __init__(self, left: Operator, a: float, right: Operator, b: float) -> None:
        if left.shape != right.shape:
            raise CurvlensError(f"{left!r} and {right!r} have different shapes: they have no sum.")
        sign = "+" if b >= 0 else "-"
        super().__init__(
            left.rows,
            left.columns,
            dtype=left.dtype,
            device=left.device,
            symmetric=left.symmetric and right.symmetric,
            psd=left.psd and right.psd and a >= 0 and b >= 0,
            name=f"({left.name} {sign} {right.name})",
        )
        self.terms = ((left, a), (right, b))

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        (left, a), (right, b) = self.terms
        return a * left._apply(vectors, progress) + b * right._apply(vectors, progress).to(vectors)

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        (left, a), (right, b) = self.terms
        return Sum(left._block(rows, columns), a, right._block(rows, columns), b)

    def _transposed(self) -> Operator:
        (left, a), (right, b) = self.terms
        return Sum(left.T, a, right.T, b)


class Wrapped(Operator):
    """Somebody else's operator: a tensor, an array, or anything with ``shape`` and ``@``."""

    def __init__(self, inner: Any, rows: Layout, columns: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, columns, dtype=dtype, device=device, name=type(inner).__name__)
        self.inner = inner
        # A matrix can be looked at; of other operators symmetry has to be said.
        if isinstance(inner, Tensor) and rows == columns:
            self.symmetric = bool(torch.equal(inner, inner.T))
        if isinstance(inner, np.ndarray) and rows == columns:
            self.symmetric = bool(np.array_equal(inner, inner.T))

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        if isinstance(self.inner, Tensor):
            return self.inner.to(vectors) @ vectors
        if isinstance(self.inner, (np.ndarray, sla.LinearOperator)):
            return torch.as_tensor(self.inner @ vectors.cpu().double().numpy()).to(vectors)
        return torch.stack([torch.as_tensor(self.inner @ v).reshape(-1).to(vectors) for v in vectors.T], dim=1)

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)

    def _transposed(self) -> Operator:
        inner = self.inner.T if hasattr(self.inner, "T") else self.inner.adjoint()
        return Wrapped(inner, self.columns, self.rows, self.dtype, self.device)


class Restricted(Operator):
    """A block of an operator that only knows its whole: pad with zeros, apply, cut out."""

    def __init__(self, inner: Operator, rows: Layout, columns: Layout) -> None:
        super().__init__(
            rows,
            columns,
            dtype=inner.dtype,
            device=inner.device,
            symmetric=inner.symmetric and rows == columns,
            psd=inner.psd and rows == columns,
            name=f"block of {inner.name}",
        )
        self.inner = inner

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        padded = vectors.new_zeros(self.inner.columns.size, vectors.shape[1])
        for name in self.columns.names:
            padded[self.inner.columns.slices[name]] = vectors[self.columns.slices[name]]
        result = self.inner._apply(padded, progress)
        return torch.cat([result[self.inner.rows.slices[name]] for name in self.rows.names])

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self.inner, rows, columns)

    def _transposed(self) -> Operator:
        return Restricted(self.inner.T, self.columns, self.rows)


def as_operator(matrix: Any, *, like: Operator | None = None) -> Operator:
    """Any matrix or operator as ours; names, dtype and device of ``like`` are taken over where the shapes agree."""
    if isinstance(matrix, Operator):
        return matrix
    shape = getattr(matrix, "shape", None)
    if shape is None or len(shape) != 2 or not hasattr(matrix, "__matmul__"):
        raise CurvlensError(f"Expected an operator (something with a 2-d shape and @), got a {type(matrix).__name__}.")
    m, n = (int(side) for side in shape)
    rows = like.rows if like is not None and like.rows.size == m else Layout({"rows": (m,)})
    columns = (
        like.columns if like is not None and like.columns.size == n else (rows if m == n else Layout({"columns": (n,)}))
    )
    dtype = matrix.dtype if isinstance(matrix, Tensor) else torch.float64
    device = matrix.device if isinstance(matrix, Tensor) else torch.device("cpu")
    if like is not None:
        dtype, device = like.dtype, like.device
    return Wrapped(matrix, rows, columns, dtype, device)
