"""Optimisers by their settings alone, for when there is no torch optimiser at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SGD:
    """Gradient descent with torch's conventions: momentum, dampening, Nesterov, weight decay in the gradient.

    >>> SGD(0.1, momentum=0.9).lr
    0.1
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """As in a parameter group of torch."""
        return {name: getattr(self, name) for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")}


@dataclass(frozen=True)
class Adam:
    """Adam with torch's conventions, long after its start: no bias correction of the learning rate.

    ``second_moment`` is v̂, flat or by parameter name. Without it v̂ = g²: what Adam has where the gradient has long
    been the one at this point. ``weight_decay`` goes into the gradient; `AdamW` decays the parameters.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    second_moment: Tensor | Mapping[str, Tensor] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As in a parameter group of torch."""
        known = {name: getattr(self, name) for name in ("lr", "betas", "eps", "weight_decay")}
        return {**known, "amsgrad": False, "decoupled_weight_decay": False}


@dataclass(frozen=True)
class AdamW(Adam):
    """`Adam` with weight decay apart from the gradient, w ← (1 − lr · weight_decay) w."""

    weight_decay: float = 1e-2

    @property
    def options(self) -> dict[str, Any]:
        """As in a parameter group of torch."""
        return {**super().options, "decoupled_weight_decay": True}


@dataclass(frozen=True)
class Preconditioned:
    """w ← w − lr · P⁻¹ (g + weight_decay · w), with a diagonal P given by hand: for optimisers that are not known here.

    ``preconditioner`` is P, flat or by parameter name. ``factor`` is the largest stable η λ_max(P⁻¹H) of the rule: 2
    without momentum, 2(1+β)/(1−β) if it averages its gradients with β, such as 38 for β = 0.9.

    >>> import torch
    >>> Preconditioned(0.1, torch.ones(3), factor=38).factor
    38
    """

    lr: float
    preconditioner: Tensor | Mapping[str, Tensor]
    factor: float = 2.0
    weight_decay: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """As a parameter group."""
        return {name: getattr(self, name) for name in ("lr", "factor", "weight_decay")}


Described = SGD | Adam | Preconditioned
"""An optimiser by its settings."""
