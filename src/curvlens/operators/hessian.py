"""The Hessian H of the loss."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens._evaluation.graph import Graph, Parts
from curvlens.operators.curvature import Curvature, require_problem
from curvlens.problem import Problem


def hessian(problem: Problem) -> Curvature:
    """H = ∂²ℓ/∂θ², exact and matrix-free.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    >>> hessian(Problem(model, (x, torch.zeros(1, 1)), MSE())).dense()  # 2 xᵀx
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """
    require_problem(problem, "hessian")

    def product(graph: Graph, rows: Sequence[str], v: Parts, retain: bool) -> Parts:
        return graph.second(rows, v, functional=False, retain=retain)

    return Curvature(problem, product, name="Hessian", psd=False)
