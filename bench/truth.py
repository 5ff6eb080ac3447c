"""What the products should be, twice, and neither by the code under test.

Dense: reverse over reverse, ``torch.autograd.functional.hessian``, for H; Jᵀ Λ J from dense Jacobian and dense loss
Hessian for G. Differences: central differences of the gradient for H; for G of the outputs and of the loss gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.model import Batch, TokenLoss
from bench.torch_rows import join, split

STEP = 1e-5
"""Step of the differences along a unit vector: rounding and the cubic term then both stay below 1e-9."""

Truth = dict[str, Tensor]
"""Kind of matrix → its product with the vector."""


def _functions(model: nn.Module, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = batch

    def outputs(theta: Tensor) -> Tensor:
        values = dict(zip(params, split(theta, list(params.values())), strict=True))
        logits: Tensor = functional_call(model, values, (x,))
        return logits.flatten()

    def loss(logits: Tensor) -> Tensor:
        value: Tensor = TokenLoss()(logits.view(*x.shape, -1), y)
        return value

    return join(list(params.values())), outputs, loss


def dense(model: nn.Module, batch: Batch, v: Tensor) -> Truth:
    """H v, G v and their difference from dense matrices."""
    theta, outputs, loss = _functions(model, batch)
    with sdpa_kernel(SDPBackend.MATH):
        H = hessian(lambda t: loss(outputs(t)), theta)  # type: ignore[no-untyped-call]
        J = jacobian(outputs, theta)  # type: ignore[no-untyped-call]
        middle = hessian(loss, outputs(theta))  # type: ignore[no-untyped-call]
    Hv, Gv = H @ v, J.T @ (middle @ (J @ v))
    return {"Hessian": Hv, "GGN": Gv, "functional": Hv - Gv}


def differences(model: nn.Module, batch: Batch, v: Tensor) -> Truth:
    """The same from first derivatives only, with torch's own attention."""
    theta, outputs, loss = _functions(model, batch)

    def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(function(at), at)[0]

    def along(function: Callable[[Tensor], Tensor], at: Tensor, direction: Tensor) -> Tensor:
        return (function(at + STEP * direction) - function(at - STEP * direction)) / (2 * STEP)

    Hv = along(lambda t: gradient(lambda s: loss(outputs(s)), t), theta, v)
    with torch.no_grad():
        f, Jv = outputs(theta), along(outputs, theta, v)
    weight = along(lambda z: gradient(loss, z), f, Jv)
    Gv = gradient(lambda t: outputs(t) @ weight, theta)
    return {"Hessian": Hv, "GGN": Gv, "functional": Hv - Gv}
