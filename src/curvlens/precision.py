"""No float32 islands in a float64 model.

Hugging Face models compute some steps in float32 whatever their dtype: RMSNorm, the softmax of eager attention, rotary
tables. In float32 or bfloat16 that protects; in a float64 model it silently costs nine digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens.surroundings import Result, within

_WIDE = torch.float64


class KeepFloat64(TorchFunctionMode):
    """Wherever float32 is asked for, in a conversion or for a new tensor, float64 is given."""

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
        if func is Tensor.view:  # the bits as they are
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
    """Inside, the float32 steps of a float64 model are done in float64; other models are left as they are.

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
