"""How near is an optimiser to the edge of stability, and which parameters leave first?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.dynamics.edge import Edge, conventions, edges, flattened
from curvlens.dynamics.fresh import begun
from curvlens.dynamics.optimizers import Group, assumed, read
from curvlens.dynamics.update import updated
from curvlens.linalg.eigs import eigs
from curvlens.linalg.vectors import norm
from curvlens.operators import diagonal, hessian
from curvlens.operators.base import Operator, Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import Eigs, Stability
from curvlens.surroundings import as_found


@as_found
def stability(
    problem: Problem,
    optimizer: Any,
    *,
    tol: float = 1e-2,
    order: Sequence[str] | None = None,
    update: bool = False,
    fresh: bool = False,
    start: Stability | Eigs | Tensor | np.ndarray | None = None,
    max_products: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    memory: int | float | str | None = None,
) -> Stability:
    """λ_max(P̃^-½ H P̃^-½) for the optimiser as it is now: 1 is the edge of stability of the quadratic model.

    The edge bounds positive curvature. Along negative curvature the quadratic model falls without end at any learning
    rate, which no edge shows; `curvlens.dynamics.forecast` does.

    P̃ = P c/η for each parameter, with its learning rate η, its preconditioner P (1, or √v̂ + ε) and the largest stable
    η λ of its rule, c: 2 for gradient descent, 2(1+β)/(1−d) with momentum β and dampening d, 2(1+β)/(1+2β) with
    Nesterov's, (1+β₁)(2−ηγ)/(1−β₁) for Adam and AdamW. Groups may differ in all of it. Weight decay γ in the gradient
    adds γ to H. P is taken as frozen (`docs/explanation/math.md`, "Stability").

    Args:
        problem: the loss; its parameters are those of the optimiser, or some of them.
        optimizer: a torch SGD, Adam, AdamW, RMSprop or Adagrad whose parameters are the problem's, or a list of them;
            its state dict; or a description such as ``cl.dynamics.SGD(0.1)``. `curvlens.dynamics.Preconditioned` takes
            the P of any other rule; Muon has none, see `curvlens.dynamics.next_step`.
        tol: the residual of the eigenvalue, relative to the spectral norm.
        order: for a state dict, the names of the parameters in the order of the optimiser. Not needed for one group
            made from ``model.parameters()``, nor where the state dict has names.
        update: also measure along the step that the optimiser takes now at this gradient: one gradient, one product
            and some forward passes.
        fresh: take g² at this point in place of second moments that the optimiser does not have yet. The ``note`` of
            the result says so.
        start: the result of an earlier step, or a vector: saves products.
        max_products, seed, progress, memory: as in `curvlens.eigs`.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> problem = Problem(model, (torch.eye(2, dtype=torch.float64), torch.zeros(2, 1)), MSE())  # H is the identity
    >>> result = stability(problem, torch.optim.SGD(model.parameters(), lr=1.5))
    >>> round(result.sharpness, 9), round(result.threshold, 9), round(result.ratio, 9)
    (1.0, 1.333333333, 0.75)
    """
    require_problem(problem, "stability")
    own = read(problem, optimizer, order, fresh=fresh, edged=True)
    scale, found, groups, note = _scaled(problem, own, fresh=fresh)
    own = own if update else []  # its moments would take room during the search
    top = eigs(
        _preconditioned(problem, found, scale),
        1,
        "largest",
        tol=tol,
        max_products=max_products,
        start=start.vector if isinstance(start, Stability) else start,
        seed=seed,
        memory=memory,
        check_copies=False,
        progress=progress,
    )
    ratio, vector = float(top.values[0]), top.vectors[:, 0].contiguous()
    shares = {name: float(vector[place].double().square().sum()) for name, place in problem.layout.slices.items()}
    limits = {edge.factor / edge.lr if edge.lr else math.inf for edge in found.values()}
    threshold = max(limits) if max(limits) <= min(limits) * (1 + 1e-9) else None
    leaving = vector * scale
    return Stability(
        rule=" and ".join(dict.fromkeys(group.kind for group in groups)),
        ratio=ratio,
        residual=float(top.residuals[0]),
        sharpness=None if threshold is None else ratio * threshold,
        threshold=threshold,
        convention=conventions(groups),
        headroom=_headroom(ratio, found),
        groups=[_record(group, found, shares) for group in groups],
        mass={name: share[0] for name, share in top.mass().items()},
        vector=vector,
        direction=(leaving / (norm(leaving) or 1.0)).to(vector.dtype),
        products=top.products,
        tol=tol,
        status=top.status,
        update=updated(problem, own) if update else None,
        note="; ".join(filter(None, (note, assumed(optimizer), top.note))),
        provenance=top.provenance,
    )


def _scaled(problem: Problem, own: list[Group], *, fresh: bool) -> tuple[Tensor, dict[str, Edge], list[Group], str]:
    """P̃^-½, flat, and the edges and groups without P and moments: in float64 each is twice as large as the model."""
    groups, note = begun(problem, own) if fresh else (own, "")
    scale, found = torch.empty(problem.layout.size, dtype=torch.float64, device=problem.device), dict[str, Edge]()
    for group in groups:
        for name in group.names:
            (edge,) = edges(replace(group, names=[name])).values()
            scaled = edge.scale(name)
            scale[problem.layout.slices[name]] = scaled.reshape(-1).to(scale) if isinstance(scaled, Tensor) else scaled
            found[name] = replace(edge, P=None)
    return scale.to(problem.dtype), found, [replace(group, state={}) for group in groups], note


def require_edges(problem: Problem, optimizer: Any) -> None:
    """Raise for an optimiser whose edge cannot be computed, before anything is."""
    groups, _ = begun(problem, read(problem, optimizer, None, fresh=True, edged=True))
    for group in groups:
        edges(group)


def _preconditioned(problem: Problem, found: dict[str, Edge], scale: Tensor) -> Operator:
    """P̃^-½ (H + γ) P̃^-½."""
    D = diagonal(scale)
    operator: Operator = D @ hessian(problem) @ D
    if any(edge.decay for edge in found.values()):
        decay = flattened(problem, {name: edge.decay for name, edge in found.items()})
        operator = operator + diagonal((scale.double().square() * decay).to(problem.dtype))
    return operator


def _headroom(ratio: float, found: dict[str, Edge]) -> float:
    """The multiple k of all learning rates that reaches the edge: 2/(ratio (2 − ηγ) + ηγ), the least over parameters.

    With k the decoupled decay grows, too: k η λ (1−β)/(1+β) = 2 − k ηγ. Where ηγ differs from group to group, the least
    k is still stable.
    """
    reached = max(ratio, 0.0)
    most = max(reached * (2 - edge.shrink) + edge.shrink for edge in found.values())
    return 2 / most if most else math.inf


def _record(group: Group, found: dict[str, Edge], shares: dict[str, float]) -> dict[str, Any]:
    """One group, for the table."""
    own = [found[name] for name in group.names]
    edge = max(own, key=lambda edge: edge.lr)
    return {
        "group": group.index,
        "lr": edge.lr,
        "factor": edge.factor,
        "threshold": edge.factor / edge.lr if edge.lr else None,
        "decay": float(group.options.get("weight_decay", 0.0)),
        "parameters": len(group.names),
        "share": sum(shares[name] for name in group.names),
    }
