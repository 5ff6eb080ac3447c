"""curvlens, as its documentation says to use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

import curvlens as cl
from bench.model import Batch


def _problem(model: nn.Module, batches: Sequence[Batch]) -> cl.Problem:
    return cl.Problem(model, list(batches), cl.losses.CrossEntropy())


def hessian(model: nn.Module, batches: Sequence[Batch]) -> Callable[[Tensor], Tensor]:
    """H v with the graph kept."""
    return cl.hessian(_problem(model, batches)).apply


def ggn(model: nn.Module, batches: Sequence[Batch]) -> Callable[[Tensor], Tensor]:
    """G v with the graph kept."""
    return cl.ggn(_problem(model, batches)).apply


def functional(model: nn.Module, batches: Sequence[Batch]) -> Callable[[Tensor], Tensor]:
    """(H − G) v with the graph kept."""
    return cl.functional(_problem(model, batches)).apply
