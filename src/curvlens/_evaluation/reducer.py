"""Where the data are shared out among processes: a sum over all of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Adds up what several processes computed from their own data; every process gets the sum.

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
        """Whether there is one process only, so that nothing has to be added."""
        ...


class Alone:
    """One process: a sum over it is what it computed."""

    alone = True

    def numbers(self, values: list[float]) -> list[float]:
        """The numbers as they are."""
        return values

    def tensor(self, value: Tensor) -> Tensor:
        """The tensor as it is."""
        return value


ALONE = Alone()
