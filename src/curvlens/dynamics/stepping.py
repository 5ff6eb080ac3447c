"""The real optimiser, on copies: where it goes from here, without touching the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from curvlens.dynamics.optimizers import CLASSES, Group
from curvlens.errors import CurvlensError
from curvlens.problem import Problem

SETTLED = 1e9
"""Steps after which no bias correction is left: those of a rule that was described."""
_WAYS = ("foreach", "fused", "capturable", "differentiable")


WITHOUT_MOMENTUM = (
    "Preconditioned(factor={:g}) has another factor than 2: the rule has a momentum, which P does not describe. Its "
    "step is known for factor=2 only."
)


class _Scaled(torch.optim.Optimizer):
    """w ← w − lr · P⁻¹ (g + weight_decay · w), with P in the state."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad + group["weight_decay"] * p) / self.state[p]["P"]


class Copies:
    """Copies of the parameters in float64 with torch's own optimisers on them, in their present state."""

    def __init__(self, problem: Problem, groups: list[Group], gradient: Tensor) -> None:
        self.problem = problem
        start, theta = problem.layout.unflatten(gradient), problem.layout.unflatten(problem.theta)
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        for group in groups:
            own = {name: nn.Parameter(_exactly(theta[name])) for name in group.names}
            if group.kind == "Preconditioned" and group.options["factor"] != 2:
                raise CurvlensError(WITHOUT_MOMENTUM.format(group.options["factor"]))
            kind = {**CLASSES, "Preconditioned": _Scaled}[group.kind]
            optimizer = kind(own.values(), lr=group.options["lr"])
            optimizer.param_groups[0].update({k: x for k, x in group.options.items() if k not in _WAYS})
            for name, p in own.items():
                state = {k: _copied(k, x) for k, x in group.state.get(name, {}).items()}
                if "exp_avg_sq" in state and "step" not in state:
                    state |= {"exp_avg": _exactly(start[name]), "step": torch.tensor(SETTLED)}
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
        parts = self.problem.layout.unflatten(gradient)
        for name, p in self.parameters.items():
            p.grad = _exactly(parts[name])
        for optimizer in self.optimizers:
            optimizer.step()


def _copied(key: str, value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if key == "step" else _exactly(value)


def _exactly(x: Tensor) -> Tensor:
    """A copy in float64."""
    return x.detach().to(torch.float64, copy=True)
