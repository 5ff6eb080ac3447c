"""Autocast: attention casts its inputs as torch's does, and computes without autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def enabled(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def taken(*given: Any) -> tuple[Any, ...]:
    """Cast tensors as torch's attention does: under autocast all but float64 get its dtype."""
    return tuple(
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and enabled(x.device)
        else x
        for x in given
    )


def off(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off, so that sums are computed in the dtype that the code chooses."""
    return torch.autocast(device.type, enabled=False) if enabled(device) else nullcontext()
