"""Checks that tensors are what a formula needs: real, finite, of one dtype and device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind


def of_one_kind(tensors: dict[str, Any]) -> None:
    """Check that all are real floating tensors of one dtype and device."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = tensor.dtype if isinstance(tensor, Tensor) else a_kind(tensor)
            hint = " Give its .weight; the arguments say which axis comes first." if hasattr(tensor, "weight") else ""
            raise CurvlensError(f"{name} is {given}, expected a tensor of real floating-point numbers.{hint}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype.itemsize == 1:
            kind = "on meta, without numbers" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise CurvlensError(
                f"{name} is {kind}; expected a dense tensor of 16, 32 or 64 bits: .to_dense(), .to(dtype)."
            )
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise CurvlensError(
                f"{first_name} is {first.dtype} on {first.device}, {name} is {tensor.dtype} on {tensor.device}: "
                "bring them to one dtype and device."
            )


def alike(tensors: dict[str, Any]) -> None:
    """Check that all are real floating tensors of one dtype and device, finite and not empty."""
    of_one_kind(tensors)
    for name, tensor in tensors.items():
        require_finite(name, tensor)


def require_finite(name: str, tensor: Tensor) -> None:
    """Check that a tensor is not empty and that all its numbers are finite."""
    if not tensor.numel():
        raise CurvlensError(f"{name} of shape {tuple(tensor.shape)} is empty.")
    # a sum is finite only if all terms are: one pass, and no mask
    if not math.isfinite(float(tensor.detach().sum())) and not tensor.isfinite().all():
        wrong = (~tensor.isfinite()).nonzero()
        first = ", ".join(str(i) for i in wrong[0].tolist())
        raise CurvlensError(f"{name} has NaN or infinite entries ({len(wrong)} of them, the first at [{first}]).")
