"""A matrix that is known by its products: algebra, blocks, conversions.

An operator maps vectors in the order of ``columns`` to vectors in the order of ``rows``. Any object with a ``shape``
and ``@`` (a tensor, a numpy array, a scipy ``LinearOperator``, another library's operator) is accepted where an
operator is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from curvlens.blocks import By, Layout, require_real
from curvlens.errors import CurvlensError, a_kind, printable
from curvlens.memory import available_bytes, readable
from curvlens.results import Solution
from curvlens.surroundings import as_found

Progress = Callable[[int, int | None], None]
BlockName = str | Iterable[str]


class Operator:
    """A linear operator on vectors of parameters. Subclasses define `_apply` and, if they have blocks, `_block`."""

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
        self.transpose_of: Operator | None = None
        """The operator whose transpose this is, if it was made by ``.T``."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype in which products are computed. It may be lower than `dtype`, that of the vectors."""
        return self.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return (self.rows.size, self.columns.size)

    def __repr__(self) -> str:
        tags = [tag for tag in ("symmetric", "psd") if getattr(self, tag)]
        dtype = str(self.dtype).removeprefix("torch.")
        return printable(f"{self.name}({self.shape[0]} × {self.shape[1]}, {', '.join([dtype, *tags])})")

    def provenance(self) -> dict[str, Any]:
        """A description for the record of a result."""
        return {
            "operator": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "blocks": list(self.rows.blocks) if len(self.rows.blocks) <= 8 else f"{len(self.rows.blocks)} blocks",
            "family": self.rows.blocks.family,
        }

    # For subclasses

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        """The product with k vectors, (columns, k) → (rows, k)."""
        raise NotImplementedError

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        """The block of some rows and columns."""
        raise CurvlensError(f"{self.name} has no named blocks.")

    def _with_names(self, rows: Layout, columns: Layout) -> Operator:
        """The same operator with these names for rows and columns, if its own have none and the sizes agree."""
        return self

    def _transposed(self) -> Operator:
        """The transpose. Subclasses that are not symmetric override it."""
        raise CurvlensError(f"{self!r} does not know its transpose.")

    # For users

    @as_found
    def apply(self, v: Any, progress: Progress | None = None) -> Any:
        """The product with a flat vector, a matrix of columns or a dict by parameter name, in the same format.

        ``progress(done, total)`` is called during the work.
        """
        if isinstance(v, Mapping):
            flat = self.columns.flatten(v, dtype=self.dtype, device=self.device)
            return self.rows.unflatten(self._apply(flat[:, None], progress)[:, 0].contiguous())
        if isinstance(v, np.ndarray):
            kind = v.dtype if v.dtype == np.float32 or np.iscomplexobj(v) else np.float64
            return self.apply(torch.from_numpy(np.ascontiguousarray(v, dtype=kind)), progress).cpu().numpy()
        v = self._checked(v, dims=(1, 2))
        result = self._apply(v[:, None] if v.ndim == 1 else v, progress)
        return result[:, 0] if v.ndim == 1 else result

    def _checked(self, v: Any, dims: tuple[int, ...]) -> Tensor:
        """A vector or matrix of the right length, on the operator's device and in its dtype."""
        if not isinstance(v, Tensor) or v.ndim not in dims or v.shape[0] != self.columns.size:
            given = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else a_kind(v)
            matrix = f", a ({self.columns.size}, k) matrix" if 2 in dims else ""
            raise CurvlensError(
                f"{self!r} takes a vector of {self.columns.size} numbers{matrix} or a dict by parameter name, "
                f"got {given}."
            )
        require_real(v)
        return v.detach().to(device=self.device, dtype=self.dtype)

    def __matmul__(self, v: Any) -> Any:
        """The product with vectors, or the composition with another operator."""
        if isinstance(v, (Operator, sla.LinearOperator)) or scipy.sparse.issparse(v):
            from curvlens.operators.composition import compose

            return compose(self, v)
        return self.apply(v)

    def __rmatmul__(self, v: Any) -> Any:
        """vᵀ A for a row vector, or a matrix of rows."""
        if not isinstance(v, (Tensor, np.ndarray)):
            raise CurvlensError(
                f"{a_kind(v)} @ {self!r}: expected a tensor or an array of {self.rows.size} numbers, or an operator."
            )
        return (self.T @ v.T).T if v.ndim == 2 else self.T @ v

    def identity(self) -> Operator:
        """The identity on the same vectors, as in ``H + 1e-3 * H.identity()``."""
        from curvlens.operators.algebra import Identity

        return Identity(self)

    def __getitem__(self, key: Any) -> Operator:
        """``H[a]`` is ``H[a, a]``; ``H[a, b]`` maps vectors of block b to block a; a list of names is their union.

        A name is that of a block (``h.3.attn.q``), a head (``h.3.attn.q.0``), a layer (``h.3``), a role (``attn.q``) or
        a parameter; patterns work too.
        """
        pair = key if isinstance(key, tuple) else (key, key)
        if len(pair) != 2:
            raise CurvlensError(
                f"A block is H[rows, columns]; {len(pair)} names given. A union is a list: H[['a', 'b']]."
            )
        return self._block(self.rows.select(pair[0]), self.columns.select(pair[1]))

    def blocks(self, by: By = "block") -> dict[str, Operator]:
        """The diagonal blocks by name. ``by`` is ``"block"`` (layer and role), ``"head"``, ``"layer"``, ``"role"`` or
        ``"parameter"``.
        """
        if self.rows != self.columns:
            raise CurvlensError(f"{self!r} has no diagonal blocks: its rows and columns are different parameters.")
        layouts = {name: self.rows.of(block) for name, block in self.rows.blocks.by(by).items()}
        return {name: self._block(layout, layout) for name, layout in layouts.items()}

    @property
    def T(self) -> Operator:  # noqa: N802 - as everywhere
        """The transpose. The transpose of a transpose is the original operator."""
        if self.symmetric:
            return self
        if self.transpose_of is not None:
            return self.transpose_of
        result = self._transposed()
        result.transpose_of = self
        return result

    @as_found
    def quadratic(self, v: Any) -> float:
        """vᵀ A v, summed in float64."""
        if self.rows != self.columns:
            raise CurvlensError(f"A quadratic form needs equal rows and columns; this is {self!r}.")
        if isinstance(v, Mapping):
            v = self.columns.flatten(v, dtype=self.dtype, device=self.device)
        return self._quadratic(self._checked(torch.as_tensor(v), dims=(1,)))

    def _quadratic(self, v: Tensor) -> float:
        return float(v.double() @ self._apply(v[:, None], None)[:, 0].double())

    @as_found
    def dense(self, progress: Progress | None = None) -> Tensor:
        """The dense matrix, computed column by column; for small operators.

        ``progress(done, total)`` is called during the work; ``total`` is None if it is not known.
        """
        needed = self.shape[0] * self.shape[1] * (self.dtype.itemsize + 8)
        free = available_bytes(self.device)
        if needed > free:
            raise CurvlensError(
                f"{self!r} as a dense matrix needs {readable(needed)}, {readable(free)} are free. "
                "Take a block: H[name]."
            )
        return self._apply(torch.eye(self.shape[1], dtype=self.dtype, device=self.device), progress)

    def solve(self, b: Any, *, damping: float = 0.0, **options: Any) -> Solution:
        """Solve (A + damping) x = b by products alone; ``.x`` has the format of b. Options: `curvlens.linalg.solve`."""
        from curvlens.linalg import solve

        return solve(self, b, damping=damping, **options)

    def inverse(self, damping: float = 0.0, **options: Any) -> Operator:
        """(A + damping)⁻¹ as an operator: each product solves a system. Options: `curvlens.linalg.solve`."""
        from curvlens.linalg.inverse import Inverse

        return Inverse(self, damping, options)

    def to_scipy(self) -> sla.LinearOperator:
        """The operator as a scipy ``LinearOperator`` on numpy arrays."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32

        def product(of: Operator, x: Any) -> Any:
            columns = torch.from_numpy(np.ascontiguousarray(x).reshape(x.shape[0], -1))
            require_real(columns)
            return of._apply(columns.to(of.device, of.dtype), None).to(dtype).cpu().numpy().reshape(-1, *x.shape[1:])

        return sla.LinearOperator(
            self.shape,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
            matvec=lambda x: product(self, x),
            matmat=lambda x: product(self, x),
            rmatvec=lambda x: product(self.T, x),
            rmatmat=lambda x: product(self.T, x),
        )

    # Algebra (imported inside: the module of sums and multiples imports this one)

    def __add__(self, other: Any) -> Operator:
        from curvlens.operators.algebra import add

        return add(self, 1.0, other, 1.0)

    def __radd__(self, other: Any) -> Operator:
        if isinstance(other, int) and other == 0:  # sum() starts with 0
            return self
        return self.__add__(other)

    def __sub__(self, other: Any) -> Operator:
        from curvlens.operators.algebra import add

        return add(self, 1.0, other, -1.0)

    def __rsub__(self, other: Any) -> Operator:
        return (-self).__add__(other)

    def __mul__(self, factor: Any) -> Operator:
        from curvlens.operators.algebra import scale

        return scale(self, factor)

    def __rmul__(self, factor: Any) -> Operator:
        return self.__mul__(factor)

    def __truediv__(self, factor: Any) -> Operator:
        if isinstance(factor, (int, float)) and factor == 0:
            raise CurvlensError(f"{self!r} was divided by 0.")
        return self.__mul__(1 / factor)

    def __neg__(self) -> Operator:
        return self.__mul__(-1.0)

    # tells numpy to leave `array @ operator` and `number * operator` to this class
    __array_ufunc__ = None

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Operators of scipy convert what stands to the right of their ``@``."""
        raise CurvlensError(
            f"{self!r} is not an array. To compose it with an operator S of scipy, write "
            "cl.operators.as_operator(S) @ H. For its entries, call H.dense()."
        )
