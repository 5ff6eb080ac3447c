"""torch.func without a library around it, on one batch.

`jvp_jacrev` and `grad_jvp` are here for the correctness table only: they are wrong through ``layer_norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp

from bench.model import Batch, TokenLoss

Parts = dict[str, Tensor]
Product = Callable[[Tensor], Tensor]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Tensors laid end to end."""
    return torch.cat([part.reshape(-1) for part in parts])


def split(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of some tensors."""
    parts = v.split([p.numel() for p in like])  # type: ignore[no-untyped-call]
    return [part.view_as(p) for part, p in zip(parts, like, strict=True)]


def _loss(model: nn.Module, batches: Sequence[Batch]) -> tuple[Callable[[Parts], Tensor], Parts]:
    ((x, y),) = batches
    point = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Parts) -> Tensor:
        value: Tensor = TokenLoss()(functional_call(model, params, (x,)), y)
        return value

    return loss, point


def _named(v: Tensor, point: Parts) -> Parts:
    return dict(zip(point, split(v, list(point.values())), strict=True))


def jvp_grad(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over reverse, everything anew for each vector."""
    loss, point = _loss(model, batches)
    return lambda v: join(list(jvp(grad(loss), (point,), (_named(v, point),))[1].values()))


def vjp_grad(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse; the function that `vjp` returns holds the graph."""
    loss, point = _loss(model, batches)
    pull = vjp(grad(loss), point)[1]
    return lambda v: join(list(pull(_named(v, point))[0].values()))


def jvp_jacrev(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over `jacrev`."""
    loss, point = _loss(model, batches)
    return lambda v: join(list(jvp(jacrev(loss), (point,), (_named(v, point),))[1].values()))


def grad_jvp(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over forward: the gradient of the directional derivative."""
    loss, point = _loss(model, batches)

    def product(v: Tensor) -> Tensor:
        return join(list(grad(lambda params: jvp(loss, (params,), (_named(v, point),))[1])(point).values()))

    return product
