"""The real optimiser, on copies: where it goes from here, without touching the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlens.dynamics.optimizers import CLASSES, Group
from curvlens.problem import Problem

SETTLED = 1e9
"""Steps after which no bias correction is left: those of a rule that was described."""
_WAYS = ("foreach", "fused", "capturable", "differentiable")


class Copies:
    """Copies of the parameters in float64 with torch's own optimisers on them, in their present state."""

    def __init__(self, problem: Problem, groups: list[Group], gradient: Tensor) -> None:
        self.problem = problem
        start = problem.layout.unflatten(gradient.double())
        theta = problem.layout.unflatten(problem.theta.double())
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        for group in groups:
            own = {name: nn.Parameter(theta[name].clone()) for name in group.names}
            optimizer = CLASSES[group.kind](own.values(), lr=group.options["lr"])  # type: ignore[call-arg]
            optimizer.param_groups[0].update({k: x for k, x in group.options.items() if k not in _WAYS})
            for name, p in own.items():
                state = {k: _copied(k, x) for k, x in group.state.get(name, {}).items()}
                if "exp_avg_sq" in state and "step" not in state:
                    state |= {"exp_avg": start[name].clone(), "step": torch.tensor(SETTLED)}
                if state:
                    optimizer.state[p] = state
            self.parameters |= own
            self.optimizers.append(optimizer)

    @property
    def theta(self) -> Tensor:
        """Where the copies are, flat, in float64."""
        parts = {name: p.detach() for name, p in self.parameters.items()}
        return self.problem.layout.flatten(parts, dtype=torch.float64, device=self.problem.device)

    def step(self, gradient: Tensor) -> None:
        """One step of all groups with a flat gradient."""
        for name, part in self.problem.layout.unflatten(gradient.double()).items():
            if name in self.parameters:
                self.parameters[name].grad = part.clone()
        for optimizer in self.optimizers:
            optimizer.step()


def _copied(key: str, value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if key == "step" else value.detach().double().clone()
