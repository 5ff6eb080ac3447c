"""`second_order`: a torch mode in which models use attention with two derivatives. Nothing is patched.

torch's fused kernels have neither a double backward nor forward-mode derivatives (pytorch#116350). Inside
`second_order` each call of ``F.scaled_dot_product_attention``, from Hugging Face, ``nn.MultiheadAttention`` or the
user's own code, runs ours. The mode belongs to the thread, can be nested, and ends with its block.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlens.sdpa.attention import scaled_dot_product_attention
from curvlens.surroundings import within


def _not_overridden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function of torch that skips the check for overrides, so that its body runs inside the mode.

    torch leaves the mode while an overridden function runs. The mode would not see the attention inside it.
    """
    assert isinstance(function, types.FunctionType)
    asking = ("has_torch_function", "has_torch_function_unary")
    scope = {**function.__globals__, **dict.fromkeys(asking, lambda tensors: False)}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


multi_head_attention = _not_overridden(F.multi_head_attention_forward)
INSIDE = {
    F.multi_head_attention_forward: multi_head_attention,
    # checkpointed layers run again in these
    torch.autograd.grad: _not_overridden(torch.autograd.grad),
    torch.autograd.backward: _not_overridden(torch.autograd.backward),
    Tensor.backward: _not_overridden(Tensor.backward),
}
"""Functions of torch that call attention inside, and their copies."""


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v/‖v‖ in plain operations: the second derivatives of torch's kernel treat ‖v‖ as a constant."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


class second_order(TorchFunctionMode, ContextDecorator):  # noqa: N801 - used as a verb: `with second_order():`
    """Inside this block attention can be differentiated twice. Results differ from the fused kernels by rounding only.

    It also replaces weight normalisation, whose second derivatives are wrong in torch 2.13.
    """

    replaced = False
    """Whether a call was replaced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.replaced = True
            return scaled_dot_product_attention(*args, **kwargs)
        if func is torch._weight_norm:
            self.replaced = True
            return _weight_norm(*args, **kwargs)
        if func in INSIDE:
            return within([self], lambda: INSIDE[func](*args, **kwargs))
        return func(*args, **kwargs)
