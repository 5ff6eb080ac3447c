"""What a bound is: a number for every block of the Hessian, and the norm of the matrix of these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.errors import CurvlensError


@dataclass(frozen=True)
class Bound:
    """Bounds on the spectral norms of the blocks, of their outer and of their functional part.

    >>> bound = Bound(("Q", "V"), torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> bound.block("Q", "V"), bound.total
    (1.0, 2.0)
    """

    names: tuple[str, ...]
    outer: Float[Tensor, "n n"]
    functional: Float[Tensor, "n n"]

    @property
    def total(self) -> float:
        """A bound on ‖H‖₂: the norm of the matrix of the blocks' bounds."""
        return float(torch.linalg.matrix_norm(self.outer + self.functional, 2))

    def block(self, first: str, second: str) -> float:
        """A bound on the norm of one block of H."""
        i, j = (self._at(name) for name in (first, second))
        return float(self.outer[i, j] + self.functional[i, j])

    def tightness(self, norm: float) -> float:
        """The true norm as a share of the bound, at most 1."""
        return norm / self.total if self.total else 1.0

    def _at(self, name: str) -> int:
        if name not in self.names:
            raise CurvlensError(f"There is no block {name!r}; there are {', '.join(self.names)}.")
        return self.names.index(name)


P = ParamSpec("P")


def in_range(bound: Callable[P, Bound]) -> Callable[P, Bound]:
    """A bound is finite, or there is none: what it is a product of may over- or underflow."""

    @functools.wraps(bound)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Bound:
        try:
            found = bound(*args, **kwargs)
        except (OverflowError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise CurvlensError(OUT_OF_RANGE) from error
        if not (found.outer.isfinite().all() and found.functional.isfinite().all()):
            raise CurvlensError(OUT_OF_RANGE)
        return found

    return checked


OUT_OF_RANGE = (
    "The bound is a product of norms, some of which over- or underflow: tokens, weights or the gradient are too large "
    "or too small. Bring them to a usual scale."
)


def selected(names: Sequence[str], wrt: str | None, outer: Tensor, functional: Tensor) -> Bound:
    """The bound for the words of ``wrt``; None for all but the tokens X."""
    words = [name for name in names if name != "X"] if wrt is None else wrt.split()
    if any(word not in names for word in words):
        raise CurvlensError(f"wrt={wrt!r}; it is made of the words {', '.join(names)}.")
    if not words:
        raise CurvlensError(f"wrt={wrt!r} leaves nothing to differentiate by; it is made of {', '.join(names)}.")
    kept = [i for i, name in enumerate(names) if name in words]
    index = torch.tensor(kept)
    return Bound(tuple(names[i] for i in kept), outer[index][:, index], functional[index][:, index])
