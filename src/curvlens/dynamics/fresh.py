"""An optimiser before its first step: second moments from the gradient at this point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.optimizers import MOMENTS, Group
from curvlens.errors import listing
from curvlens.problem import Problem


def begun(problem: Problem, groups: list[Group]) -> tuple[list[Group], str]:
    """The groups with g² where they have no second moments, and a note that says where.

    That is what Adam has after its first step, corrected, and what every rule has after many steps at one gradient.
    """
    waiting = [name for group in groups for name in group.names if _waits(group, name)]
    if not waiting:
        return groups, ""
    squares = problem.layout.unflatten(problem.gradient().to(torch.float64, copy=True).square_())
    filled = []
    for group in groups:
        state = {
            name: _first(group, squares[name], group.state.get(name, {})) for name in group.names if _waits(group, name)
        }
        filled.append(replace(group, state={**group.state, **state}))
    everywhere = len(waiting) == sum(len(group.names) for group in groups)
    where = "" if everywhere else f" of {listing(waiting)}"
    return filled, f"second moments{where} taken as g² at this point: the optimiser has none yet"


def _waits(group: Group, name: str) -> bool:
    """Whether a parameter has no second moment yet."""
    state, moment = group.state.get(name, {}), MOMENTS.get(group.kind)
    if moment is None:
        return False
    # Adagrad makes its state with the optimiser, before the first step.
    return moment not in state or (group.kind == "Adagrad" and not float(state["step"]))


def _first(group: Group, square: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter, as its rule has it once it has begun."""
    moment = MOMENTS[group.kind]
    if group.kind == "Adagrad":
        return {moment: state.get(moment, torch.zeros(())) + square, "step": torch.tensor(1.0)}
    found = {moment: square}  # no step: no bias correction is left
    if group.options.get("amsgrad"):
        found["max_exp_avg_sq"] = square
    if group.options.get("centered"):
        found["grad_avg"] = torch.zeros_like(square)
    return found
