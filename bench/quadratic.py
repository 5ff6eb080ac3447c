"""A matrix as a model for PyHessian, which only knows models: the loss ½ θᵀ A θ has the Hessian A."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Quadratic(nn.Module):
    """½ θᵀ A θ."""

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.A = A
        self.theta = nn.Parameter(torch.ones(len(A), dtype=A.dtype))

    def forward(self, _: Tensor) -> Tensor:
        return 0.5 * self.theta @ (self.A @ self.theta)


def pyhessian(A: Tensor) -> Any:
    """PyHessian's object for a matrix."""
    from pyhessian import hessian

    model = Quadratic(A)
    return hessian(model, lambda outputs, _: outputs, data=(torch.zeros(1), torch.zeros(1)), cuda=False)


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call of PyHessian, and how many products it made."""
    import pyhessian  # noqa: F401 - its name for the module is that of a class inside it

    module: Any = sys.modules["pyhessian.hessian"]
    plain, count = module.hessian_vector_product, 0

    def product(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*arguments)

    module.hessian_vector_product = product
    try:
        return call(), count
    finally:
        module.hessian_vector_product = plain
