"""Sizes of token matrices, bounds on the derivatives of a layer, and the loss in the format that bounds need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.curvature import OutputCurvature, Root
from curvlens.calculus.output_loss import Outputs, output_loss
from curvlens.errors import CurvlensError


@dataclass(frozen=True)
class Sizes:
    """Upper bounds on norms of a matrix whose rows are tokens."""

    total: float
    """‖·‖_F."""
    spectral: float
    """‖·‖₂."""
    row: float
    """The longest row."""
    column: float
    """The longest column."""
    spread: float = 0.0
    """A lower bound: the shortest row, centred if LayerNorm follows."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.total + self.spread):
            raise OverflowError("norm of tokens")

    @classmethod
    def at_most(cls, total: float, row: float | None = None, *, spread: float = 0.0) -> Sizes:
        """Sizes that follow from ‖·‖_F and, if known, the longest row."""
        return cls(total, total, total if row is None else min(row, total), total, spread)

    def __add__(self, other: Sizes) -> Sizes:
        """The sizes of a sum of matrices."""
        return Sizes(
            self.total + other.total,
            self.spectral + other.spectral,
            self.row + other.row,
            self.column + other.column,
            max(self.spread - other.row, other.spread - self.row, 0.0),
        )


def sizes(tokens: Float[Tensor, "l d"], spread: float = 0.0) -> Sizes:
    """The sizes of a given matrix."""
    return Sizes(
        float(tokens.norm()),
        spectral(tokens),
        float(tokens.norm(dim=1).max()),
        float(tokens.norm(dim=0).max()),
        spread,
    )


def spectral(matrices: Float[Tensor, "*n p q"]) -> float:
    """The largest ‖·‖₂ of one matrix or several."""
    return float(torch.linalg.matrix_norm(matrices, 2).max())


S = TypeVar("S", Sizes, Tensor)
"""A matrix given by its sizes (without data), or itself (with data)."""

Pairs = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Local(Generic[S]):
    """A layer y = f(X, weights) at a point; X is its input."""

    output: S
    first: Mapping[str, float]
    """Bounds on ‖∂y/∂·‖₂, by X and by every weight."""
    bend: Callable[[S], Pairs]
    """Maps a gradient λ at y to bounds on the blocks of Σ_b λ_b ∂²y_b; a missing block is 0."""
    back: Callable[[S], S]
    """Maps λ at y to λ at X."""
    tokens: Tensor | None = None
    """∂y/∂X at [n, a, b] = ∂y_nb/∂x_na, if it is known and tokens do not interact."""


def matrix(names: Sequence[str], pairs: Pairs) -> Float[Tensor, "n n"]:
    """The symmetric matrix of the bounds on blocks; names outside of ``names`` are no variables."""
    found = torch.zeros(len(names), len(names), dtype=torch.float64)
    at = {name: i for i, name in enumerate(names)}
    for (first, second), value in pairs.items():
        if first in at and second in at:
            found[at[first], at[second]] = found[at[second], at[first]] = value
    return found


class Seen(NamedTuple):
    """A loss: its gradient at the outputs, and norms of the two parts of its curvature."""

    gradient: Tensor | Sizes
    outer: float
    rest: float


def seen(of: Outputs, target: Any, grad: Any, curvature: Any, *, data: bool) -> Seen:
    """The square loss for a target, or any loss given by its gradient (or its norm) and its curvature."""
    if isinstance(grad, (int, float)) and not isinstance(grad, bool):
        if data or target is not None:
            raise CurvlensError(
                f"grad={grad} is the norm of a gradient, which is not enough with data=True or target=. Give the "
                "gradient itself, a tensor with the shape of the output."
            )
        number = isinstance(curvature, (int, float)) and math.isfinite(curvature)
        if not (math.isfinite(grad) and grad >= 0 and number):
            raise CurvlensError(
                f"grad={grad} with curvature={curvature!r}; expected ‖∂ℓ/∂y‖ and a bound on ‖∂²ℓ/∂y²‖, two finite "
                "numbers, the first 0 or more."
            )
        return Seen(Sizes.at_most(float(grad)), abs(float(curvature)), 0.0)
    loss = output_loss(of, target, grad, curvature, "mean")
    gradient = loss.gradient[0].double()
    return Seen(gradient if data else sizes(gradient), _norm(loss.outer), _norm(loss.rest))


def _norm(curvature: OutputCurvature) -> float:
    if isinstance(curvature, Root):
        return spectral(curvature.R) ** 2
    return spectral(curvature) if isinstance(curvature, Tensor) else abs(curvature)


def one_sample(x: Tensor) -> None:
    """Check that X is one sample, (L, d)."""
    if x.ndim != 2:
        hint = " Of several samples, average the bounds." if x.ndim > 2 else ""
        raise CurvlensError(f"X has shape {tuple(x.shape)}, expected (tokens, features), one sample.{hint}")
