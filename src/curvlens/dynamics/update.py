"""The step that an optimiser takes now, and how far along it the loss still falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from curvlens.dynamics.line import Walk
from curvlens.dynamics.optimizers import Group, read
from curvlens.dynamics.stepping import Copies
from curvlens.errors import CurvlensError
from curvlens.linalg.vectors import dot, norm
from curvlens.operators import hessian
from curvlens.problem import Problem
from curvlens.results import Status, Update
from curvlens.surroundings import as_found

FORWARD = 12
"""Forward passes of the search for the critical step."""
RESOLUTION = 1.05


@as_found
def next_step(problem: Problem, optimizer: Any, *, order: Sequence[str] | None = None) -> Update:
    """The step that an optimiser takes now, without the edge of stability: one gradient, one product, forward passes.

    An optimiser without second moments yet takes its first step.
    """
    return updated(problem, read(problem, optimizer, order, fresh=True))


def updated(problem: Problem, groups: list[Group]) -> Update:
    """d = θ_before − θ_after of one step at the gradient of the problem; the loss at multiples of it."""
    g = problem.gradient()
    d = step(problem, groups, g)
    length = norm(d)
    if not length:
        raise CurvlensError(
            "The step of the optimiser is 0: the gradient is 0, and the momentum too. Leave update out."
        )
    slope, curvature = dot(g, d), dot(hessian(problem) @ d, d)
    best = slope / curvature if curvature > 0 else math.inf
    rates = {float(group.options["lr"]) for group in groups}
    lr = rates.pop() if len(rates) == 1 else None
    walk = Walk(problem, problem.theta, -d, length, -slope / length, curvature / length**2, norm(g), FORWARD + 6, None)
    walk.begin(None)
    measured, status = _critical(walk, length, 2 * best) if slope > 0 else (0.0, Status.COMPLETE)
    first = min((t for t in walk.losses if t > 0), default=length)
    near = [first / 16, first / 4, first]  # where the quadratic model may still hold
    walk.over({1: sorted({*near, *(t for t in walk.losses if t > 0)}), -1: near})
    return Update(
        slope=slope,
        curvature=curvature,
        sharpness=None if lr is None or slope <= 0 else curvature / (lr * slope),
        best=best if slope > 0 else 0.0,
        critical=2 * best if slope > 0 else 0.0,
        measured=measured,
        line=walk.result(Status.COMPLETE, ""),
        status=status,
    )


def _critical(walk: Walk, length: float, guess: float) -> tuple[float, Status]:
    """The multiple s at which the loss is back at L: from a guess by factors of 2, then by bisection to 5 %."""
    low, high = 0.0, math.inf
    s = guess if 0 < guess < math.inf else 1.0
    start = walk.losses[0.0]
    while walk.evaluations < FORWARD and high > RESOLUTION * low:
        if walk.loss(s * length) < start:
            low = s
        else:
            high = s
        s = 2 * low if math.isinf(high) else high / 2 if not low else math.sqrt(low * high)
    if math.isinf(high):
        return math.inf, Status.COMPLETE
    return math.sqrt(low * high), Status.CONVERGED if high <= RESOLUTION * low else Status.STOPPED_AT_BUDGET


def step(problem: Problem, groups: list[Group], gradient: Tensor) -> Tensor:
    """θ_before − θ_after, by torch's own step on copies in float64."""
    copies = Copies(problem, groups, gradient)
    before = copies.theta
    copies.step(gradient)
    return (before - copies.theta).to(problem.dtype)
