"""Operators built from operators: multiples, sums, blocks, and operators of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.calculus.form import Form
from curvlens.errors import CurvlensError, a_kind
from curvlens.operators.base import Operator, Progress
from curvlens.problem import Problem


def scale(operator: Operator, factor: Any) -> Operator:
    """c A."""
    is_scalar = isinstance(factor, (int, float, np.integer, np.floating)) or (
        isinstance(factor, Tensor) and factor.ndim == 0 and not factor.is_complex()
    )
    if not is_scalar or isinstance(factor, bool):
        raise CurvlensError(f"An operator can only be scaled by a real number; got {a_kind(factor)}.")
    return Scaled(operator, float(factor))


def add(left: Operator, a: float, right: Any, b: float) -> Operator:
    """a A + b B."""
    right = as_operator(right, like=left)
    left, right = left._with_names(right.rows, right.columns), right._with_names(left.rows, left.columns)
    return Sum(left, a, right, b)


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

    @property
    def precision(self) -> torch.dtype:
        """The precision of A."""
        return self.inner.precision

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
            raise CurvlensError(f"Shapes must match to add operators; got {left!r} and {right!r}.")
        if left.rows != right.rows or left.columns != right.columns:
            raise CurvlensError(
                f"{left!r} and {right!r} belong to different parameters, so they cannot be added. Take the same blocks "
                "of both: A[name] + B[name]."
            )
        sign = "+" if b >= 0 else "-"
        super().__init__(
            left.rows,
            left.columns,
            dtype=torch.promote_types(left.dtype, right.dtype),
            device=left.device,
            symmetric=left.symmetric and right.symmetric,
            psd=left.psd and right.psd and a >= 0 and b >= 0,
            name=f"({left.name} {sign} {right.name})",
        )
        self.terms = ((left, a), (right, b))

    @property
    def precision(self) -> torch.dtype:
        """The precision of the less precise term."""
        return max((term.precision for term, _ in self.terms), key=lambda dtype: torch.finfo(dtype).eps)

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        (left, a), (right, b) = self.terms
        return a * _product(left, vectors, progress) + b * _product(right, vectors, progress)

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        (left, a), (right, b) = self.terms
        return Sum(left._block(rows, columns), a, right._block(rows, columns), b)

    def _transposed(self) -> Operator:
        (left, a), (right, b) = self.terms
        return Sum(left.T, a, right.T, b)


def _product(term: Operator, vectors: Tensor, progress: Progress | None) -> Tensor:
    """The product with a term of a sum, in the dtype of the term, for vectors in the wider dtype of the sum."""
    return term._apply(vectors.to(term.device, term.dtype), progress).to(vectors)


class Identity(Operator):
    """The identity on the vectors of another operator."""

    def __init__(self, like: Operator) -> None:
        if like.rows != like.columns:
            raise CurvlensError(f"An identity needs equal rows and columns; this is {like!r}.")
        super().__init__(
            like.rows, like.rows, dtype=like.dtype, device=like.device, symmetric=True, psd=True, name="Identity"
        )

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        return vectors.clone()

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)


class Wrapped(Operator):
    """A foreign matrix or operator: a tensor, an array, or anything with ``shape`` and ``@``.

    An operator with a ``dtype`` gets vectors in that dtype. A matrix (tensor, array, sparse) is multiplied in the dtype
    of the vectors.
    """

    def __init__(self, inner: Any, rows: Layout, columns: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, columns, dtype=dtype, device=device, name=type(inner).__name__)
        self.inner = inner
        self.declared = None if _is_matrix(inner) else declared_dtype(inner)
        # The symmetry of a matrix can be checked; that of other operators has to be declared.
        if isinstance(inner, Tensor) and inner.layout == torch.strided and rows == columns:
            self.symmetric = bool(torch.equal(inner, inner.T))
        if isinstance(inner, np.ndarray) and rows == columns:
            self.symmetric = bool(np.array_equal(inner, inner.T))

    @property
    def precision(self) -> torch.dtype:
        """The declared dtype, if it is lower than the dtype of the vectors."""
        if self.declared is None or torch.finfo(self.declared).eps < torch.finfo(self.dtype).eps:
            return self.dtype
        return self.declared

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        if isinstance(self.inner, Tensor):
            return self.inner.to(vectors) @ vectors
        # Copy in and out: an operator may write into its argument, or return a buffer that it uses again.
        if _is_matrix(self.inner) or isinstance(self.inner, sla.LinearOperator):
            kind = torch.float32 if self.declared == torch.float32 else torch.float64  # numpy has no bfloat16
            given = vectors.to("cpu", kind, copy=True).numpy()
            return torch.as_tensor(self.inner @ given).to(vectors, copy=True)
        columns = vectors.to(self.declared or vectors.dtype, copy=True).T
        return torch.stack([torch.as_tensor(self.inner @ v).reshape(-1).to(vectors) for v in columns], dim=1)

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self, rows, columns)

    def _with_names(self, rows: Layout, columns: Layout) -> Operator:
        if not (nameless(self.rows) and nameless(self.columns)) or self.shape != (rows.size, columns.size):
            return self
        return Wrapped(self.inner, rows, columns, self.dtype, self.device)

    def _transposed(self) -> Operator:
        inner = self.inner.T if hasattr(self.inner, "T") else self.inner.adjoint()
        return Wrapped(inner, self.columns, self.rows, self.dtype, self.device)


class Restricted(Operator):
    """A block of an operator without blocks of its own: pad with zeros, apply, cut out."""

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

    @property
    def precision(self) -> torch.dtype:
        """The precision of the whole operator."""
        return self.inner.precision

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        result = self.inner._apply(self.inner.columns.embed(self.columns, vectors), progress)
        return self.inner.rows.extract(self.rows, result)

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return Restricted(self.inner, rows, columns)

    def _transposed(self) -> Operator:
        return Restricted(self.inner.T, self.columns, self.rows)


def nameless(layout: Layout) -> bool:
    """Whether a layout belongs to foreign vectors: only their length is known."""
    return layout.names in (("rows",), ("columns",))


_DAMPING = "Damping is written H + c * H.identity()."


def as_operator(matrix: Any, *, like: Operator | None = None) -> Operator:
    """Any matrix or operator as an `Operator`, with names, dtype and device of ``like`` if the shapes agree."""
    if isinstance(matrix, Operator):
        return matrix
    if isinstance(matrix, Problem):
        raise CurvlensError("A Problem is not an operator. Build one: cl.hessian(problem) or cl.ggn(problem).")
    shape = getattr(matrix, "shape", None)
    if shape is None or len(shape) != 2 or not hasattr(matrix, "__matmul__"):
        closed = isinstance(getattr(matrix, "total", None), Form)
        hint = "A closed form becomes one by cl.operators.closed_form(H)." if closed else _DAMPING
        raise CurvlensError(f"Expected an operator (something with a 2-d shape and @), got {a_kind(matrix)}. {hint}")
    m, n = (int(side) for side in shape)
    rows = like.rows if like is not None and like.rows.size == m else Layout({"rows": (m,)})
    columns = (
        like.columns if like is not None and like.columns.size == n else (rows if m == n else Layout({"columns": (n,)}))
    )
    if _dtype_name(matrix).startswith("complex"):
        raise CurvlensError("The matrix is complex, expected a real one.")
    # An array is multiplied in float64 whatever its dtype, as a float64 LinearOperator would be.
    by_itself = isinstance(matrix, Tensor) or not _is_matrix(matrix)
    dtype = (declared_dtype(matrix) if by_itself else None) or torch.float64
    device = matrix.device if isinstance(matrix, Tensor) else torch.device("cpu")
    if like is not None:
        dtype, device = like.dtype, like.device
    # A copy: the tags of the operator must stay true when the user writes into the matrix.
    if isinstance(matrix, Tensor) and matrix.layout == torch.strided:
        matrix = matrix.clone()
    elif isinstance(matrix, np.ndarray):
        matrix = matrix.copy(order="K")
    return Wrapped(matrix, rows, columns, dtype, device)


def declared_dtype(matrix: Any) -> torch.dtype | None:
    """The floating dtype that an operator declares, as a torch or numpy dtype or a string; None if it has none.

    >>> declared_dtype(np.zeros((1, 1), dtype=np.float32)), declared_dtype(torch.eye(1, dtype=torch.int64))
    (torch.float32, None)
    """
    dtype = getattr(torch, _dtype_name(matrix), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _dtype_name(matrix: Any) -> str:
    """``"float32"`` for torch.float32, np.dtype("float32"), np.float32, "float32" and "torch.float32"; or ""."""
    kind = getattr(matrix, "dtype", None)
    if kind is None:
        return ""
    try:
        return str(np.dtype(kind).name)
    except TypeError:
        return str(getattr(kind, "name", kind)).rpartition(".")[2]


def _is_matrix(inner: Any) -> bool:
    """Whether the entries can be read."""
    return isinstance(inner, (Tensor, np.ndarray)) or scipy.sparse.issparse(inner)
