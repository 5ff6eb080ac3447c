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


Described = SGD | Adam
"""An optimiser by its settings."""
