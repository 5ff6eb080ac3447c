"""What a user gave, and whether there is room for what is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind
from curvlens.memory import available_bytes, readable

P = ParamSpec("P")
R = TypeVar("R")

SMALL = 1 << 26
"""Bytes for which it is not worth asking whether there is room."""


def in_own_dtype(function: Callable[P, R]) -> Callable[P, R]:
    """Calculate in the dtype of the tensors, also where the caller has autocast on: it would round every product."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


class calculated(Generic[R]):  # noqa: N801  (it is used as a decorator)
    """A property that is calculated at its first use, in the dtype of its tensors, and kept.

    In Python 3.11 a `functools.cached_property` holds a lock meanwhile, which takes as long as a small product.
    """

    def __init__(self, function: Callable[[Any], R]) -> None:
        self._calculate = in_own_dtype(function)
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> R:
        if instance is None:  # asked of the class, as documentation does
            return self  # type: ignore[return-value]
        found = instance.__dict__[self._name] = self._calculate(instance)
        return found


def of_one_kind(tensors: dict[str, Any]) -> None:
    """All are real floating tensors of one dtype and device."""
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
    """All are real floating tensors of one dtype and device, with finite numbers and nothing empty."""
    of_one_kind(tensors)
    for name, tensor in tensors.items():
        require_finite(name, tensor)


def require_finite(name: str, tensor: Tensor) -> None:
    """It has numbers, and all of them are finite."""
    if not tensor.numel():
        raise CurvlensError(f"{name} of shape {tuple(tensor.shape)} is empty.")
    # a sum is finite only if all are: one pass, and no mask
    if not math.isfinite(float(tensor.detach().sum())) and not tensor.isfinite().all():
        wrong = (~tensor.isfinite()).nonzero()
        first = ", ".join(str(i) for i in wrong[0].tolist())
        raise CurvlensError(f"{name} has NaN or infinite entries ({len(wrong)} of them, the first at [{first}]).")


def require_room(numbers: int, like: Tensor, what: str, instead: str) -> None:
    """Refuse what does not fit the memory that is free, and say its size."""
    needed = numbers * like.dtype.itemsize
    if needed < SMALL:
        return
    free = available_bytes(like.device)
    if needed > free:
        raise CurvlensError(f"{what} has {numbers} entries, {readable(needed)}; {readable(free)} are free. {instead}")


def largest(tensor: Tensor) -> float:
    """The size of the largest entry; in one pass, ten times as fast as the norm of order infinity."""
    low, high = torch.aminmax(tensor.detach())
    return max(-float(low), float(high))


def row_names(rows: Tensor) -> list[int]:
    """A number for every row (n, ·), counted from 0 in the order in which they come: equal rows have the same."""
    seen: dict[bytes, int] = {}
    plain = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # also of one column with any stride
    return [seen.setdefault(row.tobytes(), len(seen)) for row in plain.cpu().numpy()]
