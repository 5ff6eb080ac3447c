"""Sums over several processes that share the data."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Adds up the sums that several processes computed from their own data. Every process gets the result.

    All processes call it in the same order, with tensors of the same shapes.
    """

    def numbers(self, values: list[float]) -> list[float]:
        """The sum of each number over all processes."""
        ...

    def tensor(self, value: Tensor) -> Tensor:
        """The sum of a float64 tensor over all processes; the tensor given may be written into."""
        ...

    @property
    def alone(self) -> bool:
        """Whether there is only one process, so that nothing has to be added."""
        ...


class Alone:
    """A reducer for one process: it returns what it is given."""

    alone = True

    def numbers(self, values: list[float]) -> list[float]:
        """The numbers, unchanged."""
        return values

    def tensor(self, value: Tensor) -> Tensor:
        """The tensor, unchanged."""
        return value


ALONE = Alone()
