"""Quadratic problems with two parameters, and torch's own optimisers on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl


class TwoParts(nn.Module):
    """x₁ᵀa + x₂ᵀb: with the square error its loss is quadratic in (a, b)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(2, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] @ self.a + x[:, 3:] @ self.b


def quadratic(seed: int = 0) -> cl.Problem:
    """Five parameters, seven samples, minimum at 0."""
    generator = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    return cl.Problem(TwoParts(seed), (x, torch.zeros(7, dtype=torch.float64)), cl.losses.MSE())


def diverges(
    problem: cl.Problem,
    optimizer: torch.optim.Optimizer,
    steps: int = 1500,
    freeze: Callable[[], None] = lambda: None,
) -> bool:
    """Whether the optimiser leaves the quadratic: it is run, with its second moments frozen before every step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # SGD starts without momentum; what Adam's first moment holds is part of the start.
    with torch.no_grad():
        for p in parameters:
            p.copy_(1e-3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype))
    start = problem.theta.norm()
    x, y = problem.data.first()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(problem.model(x), y).backward()  # type: ignore[no-untyped-call]
        freeze()
        optimizer.step()
        size = problem.theta.norm()
        if size > 1e6 * start:
            return True
        if size < 1e-9 * start:
            return False
    return bool(size > start)


def frozen(optimizer: torch.optim.Optimizer, at: int, seed: int = 3) -> Callable[[], None]:
    """Gives the optimiser second moments of its own, and holds them and the number of steps, ``at``, fixed."""
    moments: dict[Any, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
            moments[p] = torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.05
    optimizer.step()

    def key(p: Any) -> str:
        return next(name for name in ("exp_avg_sq", "square_avg", "sum") if name in optimizer.state[p])

    def hold(step: int) -> None:
        for p, moment in moments.items():
            optimizer.state[p][key(p)].copy_(moment)
            optimizer.state[p]["step"].fill_(step)

    hold(at)
    return lambda: hold(at - 1)  # torch counts the step before it uses the number
