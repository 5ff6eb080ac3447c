"""Prevents float32 steps in a float64 model.

Hugging Face models compute some steps in float32 in any dtype: RMSNorm, the softmax of eager attention, rotary tables.
This protects bfloat16 models, but costs a float64 model nine digits without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from curvlens.surroundings import Result, within

_WIDE = torch.float64


class KeepFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in conversions and for new tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].to(_WIDE)
        if func in (Tensor.to, Tensor.type_as) and len(args) > 1 and isinstance(args[1], Tensor):
            like = args[1]
            dtype = _WIDE if like.dtype is torch.float32 else like.dtype
            return args[0].to(like.device, dtype, *args[2:], **kwargs)
        if func is Tensor.view:  # reinterprets bits
            return func(*args, **kwargs)
        args = tuple(_WIDE if _is_float32(a) else a for a in args)
        kwargs = {key: _WIDE if _is_float32(value) else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_float32(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("torch.FloatTensor", "torch.cuda.FloatTensor")
    return value is torch.float32 or value is torch.FloatTensor


@contextmanager
def keep_dtype(model: nn.Module) -> Iterator[None]:
    """Inside, the float32 steps of a float64 model run in float64. Other models do not change.

    >>> with keep_dtype(nn.Linear(1, 1).double()):
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64
    """
    if not is_float64(model):
        yield
        return
    with KeepFloat64():
        yield


def in_dtype(model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run ``action`` as inside `keep_dtype`, safe against Ctrl-C."""
    return within([KeepFloat64()], action) if is_float64(model) else action()


def is_float64(model: nn.Module) -> bool:
    """Whether the floating-point parameters of the model are float64."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes == {_WIDE}


HALF = (torch.float16, torch.bfloat16)


class HalfInside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects wider numbers that are rounded to half precision in a forward pass, by autocast or by casts.

    >>> with HalfInside() as seen:
    ...     _ = torch.tensor([0.1]).bfloat16()
    >>> seen.dtype
    torch.bfloat16
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None
        """The half precision that was found; None if there was none."""
        self.lost = 0.0
        """The largest rounding, relative to the largest number of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and result.dtype in HALF:
            lost = _lost(args[-1 if func is not torch.ops.aten._to_copy.default else 0], result)
            if lost:
                self.dtype, self.lost = result.dtype, max(lost, self.lost)
                self.rounded()
        return result

    def rounded(self) -> None:
        """Called after each rounding; subclasses override it to find out where."""


def _lost(wide: Tensor, half: Tensor) -> float:
    """The relative rounding error of a tensor in half precision. Masks and position numbers are exact."""
    if wide.dtype not in (torch.float32, _WIDE) or not wide.numel():
        return 0.0
    wide = wide.detach().to(_WIDE)
    error = (wide - half.detach().to(_WIDE)).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return float(error / wide.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-300))
