"""The generalised Gauss–Newton matrix G."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvlens._evaluation.graph import Graph
from curvlens.operators.curvature import Curvature, gauss_newton, require_problem
from curvlens.operators.draws import drawn, signs
from curvlens.problem import Problem


def ggn(problem: Problem) -> Curvature:
    """G = Jᵀ Λ J with the Jacobian J = ∂f/∂θ of the outputs and the Hessian Λ = ∂²ℓ/∂f² of the loss at them.

    With the labels of the data. It is positive semidefinite if the loss is convex in the outputs.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    >>> ggn(Problem(model, (x, torch.zeros(1, 1)), MSE())).dense()
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """
    require_problem(problem, "ggn")

    def middle(graph: Graph, t: Sequence[Tensor]) -> Sequence[Tensor]:
        assert graph.boundary is not None
        return graph.boundary.curvature(t)

    def root(graph: Graph, seed: int) -> Sequence[Tensor]:
        assert graph.boundary is not None
        return graph.boundary.sqrt_curvature(drawn(graph.boundary, seed, signs))

    loss = problem.loss_function
    with problem._evaluation.isolated():
        convex = loss.convex_on(problem.data)
    has_root = loss.has_sqrt_curvature and (convex or not loss.convex)
    return gauss_newton(problem, middle, name="GGN", psd=convex, root=root if has_root else None)
