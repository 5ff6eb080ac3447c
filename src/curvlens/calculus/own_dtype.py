"""Decorators: compute in the dtype of the given tensors, and compute a property only once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_own_dtype(function: Callable[P, R]) -> Callable[P, R]:
    """Compute in the dtype of the tensors even if the caller uses autocast, which would round every product."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


class calculated(Generic[R]):  # noqa: N801  (it is used as a decorator)
    """A property that is computed at its first use, in the dtype of its tensors, and then cached.

    In Python 3.11 `functools.cached_property` takes a lock, which costs as much time as a small product.
    """

    def __init__(self, function: Callable[[Any], R]) -> None:
        self._calculate = in_own_dtype(function)
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> R:
        if instance is None:  # accessed on the class, as documentation tools do
            return self  # type: ignore[return-value]
        found = instance.__dict__[self._name] = self._calculate(instance)
        return found
