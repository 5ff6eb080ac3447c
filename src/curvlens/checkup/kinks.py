"""Kinks of a loss (ReLU, max). A finite difference of gradients across a kink is not a second derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = ("relu", "relu_", "abs", "absolute", "sign", "clamp_min", "prelu", "leaky_relu", "threshold", "rrelu")
_AT_ZERO = {getattr(home, name) for name in _NAMES for home in (F, torch, Tensor) if hasattr(home, name)}
_CUT = {F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.hardshrink, F.softshrink, torch.clamp, Tensor.clamp}
_CUT |= {torch.clip, Tensor.clip}
_CHOICE = {torch.topk, Tensor.topk, torch.max, Tensor.max, torch.min, Tensor.min, torch.sort, Tensor.sort}
_CHOICE |= {torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin}
_EXTREME = {torch.amax, Tensor.amax, torch.amin, Tensor.amin, torch.maximum, torch.minimum, Tensor.maximum}
_EXTREME |= {Tensor.minimum, F.max_pool1d, F.max_pool2d, F.max_pool3d}
_ORDER = ("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__", "greater", "less")
_COMPARISON = {getattr(home, name) for name in _ORDER for home in (torch, Tensor) if hasattr(home, name)}
_STEP = {torch.round, Tensor.round, torch.floor, Tensor.floor, torch.ceil, Tensor.ceil}


class Kinks(TorchFunctionMode):
    """Records on which side of each kink a pass was: signs at a ReLU, the choice of a maximum, masks of ``where``."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = args[0].detach() if args and isinstance(args[0], Tensor) else None
        if before is not None and func in _AT_ZERO:
            self.sides.append(before > 0)  # before the call, which may change its input in place
        result = func(*args, **(kwargs or {}))
        if before is None:
            return result
        if func in _CUT and result.shape == before.shape:
            self.sides.append(torch.stack([result.detach() > before, result.detach() < before, before > 0]))
        elif func in _CHOICE:
            chosen = result if isinstance(result, Tensor) else result[1]
            if not chosen.is_floating_point():
                self.sides.append(chosen.detach().clone())
        elif func in _EXTREME and result.numel() <= before.numel():
            other = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
            self.sides.append(before > other.detach() if other is not None else _largest(before, result.detach()))
        elif func in _STEP or func in _COMPARISON:
            self.sides.append(result.detach().clone())
        elif func in (torch.where, Tensor.where):
            self.sides.append(before.bool())
        return result

    def same_as(self, other: Kinks) -> bool:
        """Whether another pass was on the same side everywhere."""
        return len(self.sides) == len(other.sides) and all(map(_equal, self.sides, other.sides))


def _largest(before: Tensor, result: Tensor) -> Tensor:
    """Which entries equal an extreme value. This is enough to see a change."""
    return torch.isin(before, result)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))
