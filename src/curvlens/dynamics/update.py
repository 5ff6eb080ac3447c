"""The step that an optimiser takes now, and how far along it the loss still falls."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.line import Walk
from curvlens.dynamics.optimizers import CLASSES, Group, members, read, require_moved, unwrapped
from curvlens.dynamics.stepping import Copies
from curvlens.errors import CurvlensError, a_kind
from curvlens.linalg.vectors import dot, norm
from curvlens.operators import hessian
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import Status, Update
from curvlens.surroundings import as_found

FORWARD = 12
"""Forward passes of the search for the critical step."""
RESOLUTION = 1.05


@as_found
def next_step(problem: Problem, optimizer: Any, *, order: Sequence[str] | None = None) -> Update:
    """The step that an optimiser takes now, and how far along it the loss falls.

    One gradient, one product, some forward passes. The optimiser and the model are not touched: it steps on copies. An
    optimiser without second moments yet takes its first step.

    Args:
        problem: the loss; all of its parameters are moved.
        optimizer: any torch optimiser, Muon too; a list of them, if each moves some of the parameters; a state dict or
            a description as in `curvlens.stability`.
        order: names for a state dict, as in `curvlens.stability`.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> problem = Problem(model, (torch.eye(2, dtype=torch.float64), torch.ones(2, 1)), MSE())  # H is the identity
    >>> round(next_step(problem, torch.optim.SGD(model.parameters(), lr=0.5)).critical, 9)  # η = 1 is back at the loss
    4.0
    """
    require_problem(problem, "next_step")
    g = problem.gradient()
    foreign = [each for each in map(unwrapped, members(optimizer)) if _is_foreign(each)]
    if not foreign:
        groups = read(problem, optimizer, order, fresh=True)
        return _along(problem, g, step(problem, groups, g), {float(group.options["lr"]) for group in groups})
    moves, rates = list[dict[str, Tensor]](), set[float]()
    for each in map(unwrapped, members(optimizer)):
        if not isinstance(each, torch.optim.Optimizer):
            raise CurvlensError(
                f"The list has {a_kind(each)} beside {a_kind(foreign[0])}. Give all of them as optimisers."
            )
        moves.append(_foreign(problem, each, g))
        rates |= {float(group["lr"]) for group in each.param_groups if "lr" in group}
    require_moved(problem, [name for own in moves for name in own])
    whole = {name: part for own in moves for name, part in own.items()}
    d = problem.layout.flatten(whole, dtype=torch.float64, device=problem.device).to(problem.dtype)
    return _along(problem, g, d, rates)


def updated(problem: Problem, groups: list[Group]) -> Update:
    """d = θ_before − θ_after of one step at the gradient of the problem; the loss at multiples of it."""
    g = problem.gradient()
    return _along(problem, g, step(problem, groups, g), {float(group.options["lr"]) for group in groups})


def _is_foreign(optimizer: object) -> bool:
    """Whether it is an optimiser of torch's kind that is not known by name."""
    known = CLASSES.get(type(optimizer).__name__)
    return isinstance(optimizer, torch.optim.Optimizer) and known is not type(optimizer)


def _foreign(problem: Problem, optimizer: torch.optim.Optimizer, g: Tensor) -> dict[str, Tensor]:
    """θ_before − θ_after by name, by the step of a deep copy in its own precision."""
    names = {id(p): name for name, p in problem._evaluation.parameters().items()}
    gradient = problem.layout.unflatten(g)
    theta = problem.layout.unflatten(problem.theta)
    copied = copy.deepcopy(optimizer)
    pairs = [
        (names[id(p)], twin)
        for group, other in zip(optimizer.param_groups, copied.param_groups, strict=True)
        for p, twin in zip(group["params"], other["params"], strict=True)
        if id(p) in names
    ]
    with torch.no_grad():
        for name, twin in pairs:
            twin.copy_(theta[name])
            twin.grad = gradient[name].to(twin.dtype).clone()
    before = {name: twin.detach().double().clone() for name, twin in pairs}
    try:
        copied.step()
    except Exception as error:
        raise CurvlensError(
            f"{type(optimizer).__name__} cannot step from a gradient alone: {error}. Optimisers that evaluate the loss "
            "themselves (a closure) are not known."
        ) from error
    return {name: before[name] - twin.detach().double() for name, twin in pairs}


def _along(problem: Problem, g: Tensor, d: Tensor, rates: set[float]) -> Update:
    """The loss along −d."""
    length = norm(d)
    if not length:
        raise CurvlensError(
            "The step of the optimiser is 0: the gradient is 0, and the momentum too. Leave update out."
        )
    slope, curvature = dot(g, d), dot(hessian(problem) @ d, d)
    if not all(map(math.isfinite, (length, slope, curvature, norm(g)))):
        raise CurvlensError(
            f"‖g‖ = {norm(g):.3g}, ‖d‖ = {length:.3g}, gᵀd = {slope:.3g} and dᵀHd = {curvature:.3g} of the step d: a "
            "number is beyond float64. Scale the loss or the data."
        )
    best = slope / curvature if curvature > 0 else math.inf
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
    """θ_before − θ_after, by torch's own step on copies in float64, one parameter after the other.

    All of these rules move each parameter by itself, so that no copy of the whole model is needed.
    """
    found = torch.zeros_like(problem.theta)
    for group in groups:
        for name in group.names:
            copies = Copies(problem, [replace(group, names=[name])], gradient)
            moved = copies.parameters[name]
            before = moved.detach().clone()
            copies.step(gradient)
            found[problem.layout.slices[name]] = (before - moved.detach()).reshape(-1).to(found)
    return found
