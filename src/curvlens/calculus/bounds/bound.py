"""A bound: a number for every block of the Hessian, and the norm of the matrix of these numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.form import Form
from curvlens.errors import CurvlensError, a_kind


@dataclass(frozen=True, repr=False)
class Bound:
    """Bounds on the spectral norms of the blocks, of their outer and of their functional part.

    >>> bound = Bound(("Q", "V"), torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> bound.block("Q", "V"), round(bound.total, 3)
    (1.0, 2.0)
    >>> bound
    Bound(total 2; Q 1, V 1)
    """

    names: tuple[str, ...]
    outer: Float[Tensor, "n n"]
    functional: Float[Tensor, "n n"]

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} {self.block(name, name):.3g}" for name in self.names)
        return f"Bound(total {self.total:.3g}; {blocks})"

    @property
    def total(self) -> float:
        """A bound on ‖H‖₂: the norm of the matrix of the blocks' bounds."""
        return float(torch.linalg.matrix_norm(self.outer + self.functional, 2))

    def block(self, first: str, second: str) -> float:
        """A bound on the norm of one block of H."""
        i, j = (self._at(name) for name in (first, second))
        return float(self.outer[i, j] + self.functional[i, j])

    def tightness(self, of: Any = None, *, spectral_norm: float | None = None) -> float:
        """The true spectral norm ‖H‖₂ divided by the bound, at most 1 (up to rounding).

        Args:
            of: The Hessian: a closed form, a `Form` of it, or a dense matrix, whose spectral norm is computed.
            spectral_norm: Instead of ``of``, the norm as a number: the largest |eigenvalue|. The ``norm()`` of a closed
                form is the Frobenius norm, which is larger.

        >>> bound = Bound(("Q", "V"), torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> round(bound.tightness(torch.eye(2)), 3), round(bound.tightness(spectral_norm=1.5), 3)
        (0.5, 0.75)
        """
        if (of is None) == (spectral_norm is None):
            raise CurvlensError("tightness takes the Hessian or spectral_norm=, one of the two.")
        norm, room = _spectral(of) if spectral_norm is None else (_size(spectral_norm), ROUNDING)
        if not norm <= self.total * (1 + room):
            raise CurvlensError(
                f"The given norm {norm:.6g} is larger than the bound {self.total:.6g} on the spectral norm of this "
                "Hessian. Is it a Frobenius norm, or the norm of another Hessian?"
            )
        return norm / self.total if self.total else 1.0

    def _at(self, name: str) -> int:
        if name not in self.names:
            raise CurvlensError(f"There is no block {name!r}. The blocks are {', '.join(self.names)}.")
        return self.names.index(name)


ROUNDING = 1e-6
"""The relative amount by which rounding may lift the float64 norm of a Hessian above its bound."""


def _size(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        raise CurvlensError(f"spectral_norm={number!r}; expected ‖H‖₂, a finite number that is not negative.")
    return float(number)


def _spectral(of: Any) -> tuple[float, float]:
    """‖·‖₂ of a closed form or a dense matrix, and the share of it that may be rounding."""
    form = getattr(of, "total", of)
    matrix = form.dense() if isinstance(form, Form) else of
    dense = isinstance(matrix, Tensor) and matrix.is_floating_point() and matrix.ndim == 2
    if not dense or matrix.shape[0] != matrix.shape[1] or not matrix.isfinite().all():
        given = f"a tensor of shape {tuple(of.shape)}, {of.dtype}" if isinstance(of, Tensor) else a_kind(of)
        hint = " A number is named: tightness(spectral_norm=…)." if isinstance(of, (int, float)) else ""
        raise CurvlensError(
            f"tightness was given {given}, expected a closed form, a Form of it, or a finite symmetric matrix.{hint}"
        )
    rounding = max(ROUNDING, torch.finfo(matrix.dtype).eps ** 0.5)
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2)), rounding


P = ParamSpec("P")


def in_range(bound: Callable[P, Bound]) -> Callable[P, Bound]:
    """Decorate a bound: raise an error if its factors over- or underflow."""

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
    """The bound for the words of ``wrt``; None means all but the tokens X."""
    words = [name for name in names if name != "X"] if wrt is None else wrt.split()
    if any(word not in names for word in words):
        raise CurvlensError(f"wrt={wrt!r}, expected words among {', '.join(names)}.")
    if not words:
        raise CurvlensError(f"wrt={wrt!r} names no variable, expected words among {', '.join(names)}.")
    kept = [i for i, name in enumerate(names) if name in words]
    index = torch.tensor(kept)
    return Bound(tuple(names[i] for i in kept), outer[index][:, index], functional[index][:, index])
