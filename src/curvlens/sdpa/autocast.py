"""Autocast: attention takes its inputs as torch's would, and is computed without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def enabled(device: torch.device) -> bool:
    """Whether tensors on a device are under autocast."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def taken(*given: Any) -> tuple[Any, ...]:
    """Tensors as torch's attention would take them: under autocast all but float64 in its dtype."""
    return tuple(
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and enabled(x.device)
        else x
        for x in given
    )


def off(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, nothing is cast: sums are made in the dtype that the code says."""
    return torch.autocast(device.type, enabled=False) if enabled(device) else nullcontext()
