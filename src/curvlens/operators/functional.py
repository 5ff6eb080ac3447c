"""The functional part F of the Hessian."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens._evaluation.graph import Graph, Parts
from curvlens.errors import CurvlensError
from curvlens.losses import FromModel
from curvlens.operators.curvature import Curvature, require_problem
from curvlens.problem import Problem


def functional(problem: Problem) -> Curvature:
    """F = Σ_c (∂ℓ/∂f_c) ∂²f_c/∂θ²: the curvature of the model itself, H = G + F.

    Computed directly, as the Hessian of ⟨λ, f(θ)⟩ with λ = ∂ℓ/∂f held fixed; never as a difference.

    >>> model = torch.nn.Linear(2, 1).double()  # linear in its parameters: no curvature of its own
    >>> functional(Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())).dense().abs().max()
    tensor(0., dtype=torch.float64)
    """
    require_problem(problem, "functional")
    if isinstance(problem.loss_function, FromModel):
        raise CurvlensError(
            f"{problem.loss_function!r} maps the model to a number, so there are no outputs at which to split off the "
            "functional part. Use one of curvlens.losses, or a function (outputs, batch) -> (sum, count)."
        )

    def product(graph: Graph, rows: Sequence[str], v: Parts, retain: bool) -> Parts:
        return graph.second(rows, v, functional=True, retain=retain)

    return Curvature(problem, product, name="Functional", psd=False)
