"""A direction in the space of the parameters, as users give it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind
from curvlens.linalg.vectors import norm
from curvlens.problem import Problem

SHORTEST = 1e-100
Direction = Tensor | Mapping[str, Tensor]
"""A flat vector, also as the only column of a matrix, or a dict by parameter name."""


def length_of(u: Tensor, what: str = "The direction") -> float:
    """‖u‖, if it is a number whose square is one, too."""
    length = norm(u)
    if not bool(u.any()):
        raise CurvlensError(f"{what} is 0 in every entry. Give one with a length, such as problem.gradient().")
    if not SHORTEST < length < 1 / SHORTEST:
        raise CurvlensError(
            f"{what} has entries up to {float(u.abs().max()):.1g}, so that ‖u‖² is beyond float64. Scale it: "
            "direction / direction.abs().max()."
        )
    return length


def flat(problem: Problem, direction: Direction, what: str = "The direction") -> Tensor:
    """A direction as a flat vector of the problem."""
    if isinstance(direction, Mapping):
        flat = problem.layout.flatten(direction, dtype=problem.dtype, device=problem.device)
    elif isinstance(direction, Tensor) and direction.shape == (problem.layout.size,):
        flat = direction.detach().to(problem.device, problem.dtype)
    elif isinstance(direction, Tensor) and direction.shape == (problem.layout.size, 1):
        flat = direction.detach()[:, 0].to(problem.device, problem.dtype)
    elif isinstance(direction, Tensor) and direction.ndim == 2 and len(direction) == problem.layout.size:
        raise CurvlensError(
            f"{what} has to be one vector, got {direction.shape[1]} columns. Give one of them, as vectors[:, 0]."
        )
    else:
        given = f"shape {tuple(direction.shape)}" if isinstance(direction, Tensor) else a_kind(direction)
        raise CurvlensError(
            f"{what} has to be a flat vector of {problem.layout.size} numbers or a dict by parameter name, got {given}."
        )
    if not bool(torch.isfinite(flat).all()):
        raise CurvlensError(f"{what} has entries that are NaN or infinite.")
    return flat
