"""A closed-form Hessian as an operator: `eigs`, `density`, `trace` and others accept it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from curvlens.blocks import Layout
from curvlens.calculus.attention import AttentionHessian, Root
from curvlens.calculus.form import Form
from curvlens.errors import CurvlensError, a_kind
from curvlens.operators.base import Operator, Progress


class ClosedForm(Operator):
    """The operator of a closed form, or of a block of it."""

    def __init__(
        self,
        form: Form,
        product: Callable[[Tensor], Tensor],
        rows: Layout | None = None,
        columns: Layout | None = None,
        *,
        convex: bool = False,
    ) -> None:
        self._whole = Layout(form.shapes)
        rows, columns = rows or self._whole, columns or self._whole
        same = rows == columns
        super().__init__(
            rows, columns, dtype=form.dtype, device=form.device, symmetric=same, psd=same and convex, name="ClosedForm"
        )
        self.form, self._product, self._convex = form, product, convex

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        result = self._whole.extract(self.rows, self._product(self._whole.embed(self.columns, vectors)))
        if progress is not None:
            progress(vectors.shape[1], vectors.shape[1])
        return result

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return ClosedForm(self.form, self._product, rows, columns, convex=self._convex)

    def _transposed(self) -> Operator:
        return self._block(self.columns, self.rows)


def closed_form(of: Any, part: Literal["outer", "functional", "total"] = "total") -> Operator:
    """The operator of a Hessian of `curvlens.calculus`, or of one `Form` of it. Its blocks have the form's names.

    >>> from curvlens.calculus import attention
    >>> X, W = torch.eye(3, 2).double(), torch.eye(2).double()
    >>> H = closed_form(attention.hessian(X, W, W, W, target=torch.zeros(3, 2).double()))
    >>> H.shape, H["Q", "V"].shape
    ((12, 12), (4, 4))
    """
    if isinstance(of, Form):
        if part != "total":
            raise CurvlensError(
                f"part={part!r} was given with a Form, which is one part already. Give the Hessian, or leave part= out."
            )
        return ClosedForm(of, of.matvec)
    form = getattr(of, part, None)
    if not isinstance(form, Form):
        raise CurvlensError(
            "closed_form takes a Hessian of curvlens.calculus and part='outer', 'functional' or 'total'; got "
            f"{a_kind(of)} and {part!r}."
        )
    if isinstance(of, AttentionHessian):
        curvature = of.loss.outer
        convex = part == "outer" and (isinstance(curvature, Root) or (isinstance(curvature, float) and curvature >= 0))
        return ClosedForm(form, lambda v: of.matvec(v, part), convex=convex)
    return ClosedForm(form, form.matvec)
