"""The sum over the pieces of the data. All results use this one.

The loss is Σ token losses / Σ valid tokens. The gradient, products with vectors, square roots, quadratic forms,
profiles and Hessians by activations have the same form: a sum of terms over the pieces, and one division by the count
of all tokens. The terms of this process are added in float64, then the sums of all processes (`Reducer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from curvlens._evaluation.reducer import Reducer

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation


class Counted(Protocol):
    """What is computed for one piece: a loss, a gradient, a graph, a recording."""

    @property
    def count(self) -> float:
        """Its valid tokens."""
        ...


class Accumulator(Protocol):
    """A sum under construction."""

    def add(self, term: Any) -> None:
        """Add the term of one piece."""
        ...

    def reduce(self, reducer: Reducer) -> None:
        """Add the sums of the other processes."""
        ...


Item = TypeVar("Item", bound=Counted)


def summed(
    evaluation: Evaluation,
    items: Iterable[Item],
    term: Callable[[Item, int], Any],
    totals: Sequence[Accumulator],
    tick: Callable[[], None] = lambda: None,
) -> float:
    """Add ``term(item, j)`` to ``totals[j]`` for every item and j. Return the count to divide by.

    ``items`` has one item for each piece of the data. Each is freed before the next one is made. ``tick`` is called
    after every term. A generator is closed also after an error. It sets states of torch while it runs. If it were freed
    later, with the traceback, it would reset them in the middle of another computation.
    """
    count, each = 0.0, iter(items)
    try:
        for item in each:
            for j, total in enumerate(totals):
                total.add(term(item, j))
                tick()
            count += item.count
            del item  # before the next one is made
    finally:
        if isinstance(each, GeneratorType):
            each.close()
    for total in totals:
        total.reduce(evaluation.reducer)
    (count,) = evaluation.reducer.numbers([count])
    return evaluation.remember_count(count)


class Number:
    """A sum of numbers."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, term: float) -> None:
        """Add a number."""
        self.value += term

    def reduce(self, reducer: Reducer) -> None:
        """Add the sums of the other processes."""
        (self.value,) = reducer.numbers([self.value])


class Table:
    """A sum of float64 tensors by name; a name that is missing means zeros."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, term: dict[str, Tensor]) -> None:
        """Add a table."""
        for name, value in term.items():
            self.values[name] = self.values[name] + value if name in self.values else value

    def reduce(self, reducer: Reducer) -> None:
        """Add the tables of the other processes. They have the same names: all run the same model."""
        if not reducer.alone:
            self.values = {name: reducer.tensor(value) for name, value in sorted(self.values.items())}


class OwnRows:
    """A column in which every piece has rows of its own, so nothing is added."""

    def __init__(self, column: Tensor, places: Iterable[slice]) -> None:
        self._column, self._places = column, list(places)
        self.number = 0
        """The number of the next piece."""

    @property
    def place(self) -> slice:
        """The rows of the next piece."""
        return self._places[self.number]

    def add(self, term: Tensor) -> None:
        """Write the rows of the next piece."""
        self._column[self.place] = term.reshape(-1).to(self._column.dtype)
        self.number += 1

    def reduce(self, reducer: Reducer) -> None:
        """Do nothing: the rows of other processes belong to their own data."""
