"""How a model comes to use attention that can be differentiated twice: a mode, not a patch.

torch's fused kernels have neither a double backward nor forward-mode derivatives (pytorch#116350). Inside
`second_order` every call of ``F.scaled_dot_product_attention``, be it from Hugging Face, ``nn.MultiheadAttention`` or
the user's own code, takes ours. The mode belongs to the thread, nests, and ends with its block.
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
    """A copy of a Python function of torch that does not ask for overrides, so that its body runs inside the mode.

    torch leaves the mode while an overridden function runs, and thereby hides the attention inside it.
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
    # what is checkpointed runs again in them
    torch.autograd.grad: _not_overridden(torch.autograd.grad),
    torch.autograd.backward: _not_overridden(torch.autograd.backward),
    Tensor.backward: _not_overridden(Tensor.backward),
}
"""Functions that attention is inside of."""


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v/‖v‖, written out: the second derivatives of torch's own kernel take ‖v‖ for a constant."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


class second_order(TorchFunctionMode, ContextDecorator):  # noqa: N801 - used as a verb: `with second_order():`
    """Inside, attention can be differentiated twice; results differ from the fused kernels' by rounding only.

    So can weight normalisation, whose second derivatives are wrong in torch 2.13.
    """

    replaced = False
    """Whether something was computed in another way than torch's."""

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
