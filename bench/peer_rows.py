"""The peers, as their documentation says to use them. Imports are inside: a peer that is missing is a row, no crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from bench.model import Batch, TokenLoss
from bench.torch_rows import join, split

Product = Callable[[Tensor], Tensor]


def curvlinops_hessian(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over `jacrev`, vmapped, anew for each vector; the constructor multiplies twice to check itself."""
    from curvlinops import HessianLinearOperator

    operator: Any = HessianLinearOperator(model, TokenLoss(), list(model.parameters()), list(batches))
    return lambda v: operator @ v


def curvlinops_ggn(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward mode, then reverse mode, vmapped, anew for each vector."""
    from curvlinops import GGNLinearOperator

    operator: Any = GGNLinearOperator(model, TokenLoss(), list(model.parameters()), list(batches))
    return lambda v: operator @ v


def pyhessian_batch(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse with the graph of one batch kept: what its ``eigenvalues`` and ``trace`` call."""
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    (batch,) = batches
    state: Any = hessian(model, TokenLoss(), data=batch, cuda=False)
    return lambda v: join(hessian_vector_product(state.gradsH, state.params, split(v, state.params)))


def pyhessian_loader(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse over a loader, anew for each vector."""
    from pyhessian import hessian

    state: Any = hessian(model, TokenLoss(), dataloader=list(batches), cuda=False)
    return lambda v: join(state.dataloader_hv_product(split(v, state.params))[1])


def eigenthings_hessian(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse, anew for each vector."""
    from hessian_eigenthings import HessianOperator, supervised_loss

    operator: Any = HessianOperator(model, list(batches), supervised_loss(TokenLoss()))
    return lambda v: operator @ v


def eigenthings_ggn(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward mode, then reverse mode, anew for each vector."""
    from hessian_eigenthings import GGNOperator, supervised_forward, supervised_loss_of_output

    operator: Any = GGNOperator(model, list(batches), supervised_forward, supervised_loss_of_output(TokenLoss()))
    return lambda v: operator @ v
