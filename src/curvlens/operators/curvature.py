"""The operators of a problem: sums of products over its data, restricted to some rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from curvlens._evaluation.graph import Graph, Parts
from curvlens._evaluation.sums import Number, summed
from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses import FromModel
from curvlens.operators import products
from curvlens.operators.base import Operator, Progress
from curvlens.operators.products import GraphProduct
from curvlens.problem import Problem

Middle = Callable[[Graph, Sequence[Tensor]], Sequence[Tensor]]
"""The matrix M in Jᵀ M J, as a function of J v at the outputs."""

RootDraw = Callable[[Graph, int], Sequence[Tensor]]
"""A square root of M applied to random signs of a given seed."""


def require_problem(problem: object, name: str) -> None:
    """Raise an error if ``problem`` is not a Problem."""
    if not isinstance(problem, Problem):
        raise CurvlensError(f"{name} was given {a_kind(problem)}, expected a Problem(model, data, loss).")


class Curvature(Operator):
    """An exact, matrix-free, symmetric operator of a problem, or a block of one."""

    def __init__(
        self,
        problem: Problem,
        product: GraphProduct,
        *,
        name: str,
        psd: bool,
        rows: Layout | None = None,
        columns: Layout | None = None,
    ) -> None:
        rows = problem.layout if rows is None else rows
        columns = problem.layout if columns is None else columns
        super().__init__(
            rows,
            columns,
            dtype=problem.dtype,
            device=problem.device,
            symmetric=rows == columns,
            psd=psd and rows == columns,
            name=name,
        )
        self.problem = problem
        self._product = product
        self._convex = psd

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        rows, columns = self.rows.whole, self.columns.whole  # graphs have whole parameters only
        vectors = columns.embed(self.columns, vectors)
        applied = products.apply(self.problem._evaluation, self._product, rows, columns, vectors, progress)
        return rows.extract(self.rows, applied)

    def each(self, vectors: Sequence[Tensor], progress: Progress | None = None) -> Iterator[Tensor]:
        """The products with flat vectors of whole parameters, one at a time, without a matrix of them."""
        return products.each(self.problem._evaluation, self._product, self.rows, self.columns, vectors, progress)

    def _block(self, rows: Layout, columns: Layout) -> Curvature:
        return Curvature(self.problem, self._product, name=self.name, psd=self._convex, rows=rows, columns=columns)

    def _transposed(self) -> Curvature:
        return self._block(self.columns, self.rows)

    def provenance(self) -> dict[str, Any]:
        """A description of the operator and its problem, for the record of a result."""
        return {**super().provenance(), "n_tokens": self.problem.n_tokens, "loss": repr(self.problem.loss_function)}


class GaussNewton(Curvature):
    """Jᵀ M J with a matrix M at the outputs, or a block of it."""

    def __init__(
        self,
        problem: Problem,
        middle: Middle,
        *,
        name: str,
        psd: bool,
        rows: Layout | None = None,
        columns: Layout | None = None,
        root: RootDraw | None = None,
    ) -> None:
        def product(graph: Graph, rows: Sequence[str], v: Parts, retain: bool) -> Parts:
            return graph.pull(rows, middle(graph, graph.push(v)), retain=retain)

        super().__init__(problem, product, name=name, psd=psd, rows=rows, columns=columns)
        self._middle, self._root = middle, root

    def _block(self, rows: Layout, columns: Layout) -> GaussNewton:
        return GaussNewton(
            self.problem, self._middle, name=self.name, psd=self._convex, rows=rows, columns=columns, root=self._root
        )

    @property
    def has_roots(self) -> bool:
        """Whether `roots` works: this is a square diagonal block, and the loss has a square root of its curvature."""
        return self._root is not None and self.rows == self.columns

    def roots(self, seeds: Sequence[int], progress: Progress | None = None) -> Iterator[tuple[Parts, float]]:
        """For each seed u = Jᵀ M^½ z by whole parameters, and c with E u uᵀ / c = this matrix, by one backward pass."""
        root, whole = self._root, self.rows.whole
        assert root is not None

        def term(graph: Graph, j: int, retain: bool) -> Parts:
            return graph.pull(whole.names, root(graph, seeds[j]), retain=retain)

        for total, count in products.sums(self.problem._evaluation, len(seeds), term, whole, whole, progress):
            yield total.parts(), count

    def _quadratic(self, v: Tensor) -> float:
        """⟨J v, M J v⟩: half the cost of a product, because no backward pass to the parameters is needed."""
        columns = self.columns.whole
        parts = columns.unflatten(columns.embed(self.columns, v))
        total, evaluation = Number(), self.problem._evaluation

        def term(graph: Graph, _: int) -> float:
            t = graph.push(parts)
            u = self._middle(graph, t)
            return sum(float((x.double() * y.double()).sum()) for x, y in zip(t, u, strict=True))

        count = summed(evaluation, evaluation.cache.graphs(columns.names), term, [total])
        return total.value / count


def require_outputs(problem: Problem, what: str) -> None:
    """Raise an error if the loss takes the model as a whole: the Gauss–Newton part needs outputs."""
    if isinstance(problem.loss_function, FromModel):
        raise CurvlensError(
            f"{problem.loss_function!r} maps the model to a number and so hides the outputs at which {what} splits the "
            "Hessian. Use one of curvlens.losses, or a function (outputs, batch) -> (sum, count)."
        )


def gauss_newton(
    problem: Problem, middle: Middle, *, name: str, psd: bool, root: RootDraw | None = None
) -> GaussNewton:
    """Jᵀ M J with a matrix M at the outputs."""
    if isinstance(problem.loss_function, FromModel):
        raise CurvlensError(
            f"{problem.loss_function!r} maps the model to a number and so hides the outputs at which {name} splits "
            "the Hessian. Use one of curvlens.losses, or a function (outputs, batch) -> (sum, count); "
            "curvlens.hessian works as it is."
        )

    return GaussNewton(problem, middle, name=name, psd=psd, root=root)
