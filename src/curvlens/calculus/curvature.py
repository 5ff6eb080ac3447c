"""The second derivative S_i = ∂²ℓ/∂f_i² of a loss at every output token: a number, matrices, or a root of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Root:
    """S = R Rᵀ, given by R (…, L, d_V, r). For a loss of few classes r is small, and S is never built.

    >>> Root(torch.ones(2, 1)).dense()
    tensor([[1., 1.],
            [1., 1.]])
    """

    R: Tensor

    def dense(self) -> Float[Tensor, "*batch d d"]:
        """S itself."""
        return self.R @ self.R.mT


OutputCurvature = float | Tensor | Root
"""A number c means c·I."""


def flat(curvature: OutputCurvature) -> OutputCurvature:
    """(B, L, …) as (B·L, …)."""
    if isinstance(curvature, Root):
        return Root(curvature.R.flatten(0, 1))
    return curvature.flatten(0, 1) if isinstance(curvature, Tensor) else curvature


def copied(curvature: OutputCurvature) -> OutputCurvature:
    """A copy with a tensor of its own."""
    if isinstance(curvature, Root):
        return Root(curvature.R.clone())
    return curvature.clone() if isinstance(curvature, Tensor) else curvature


def is_zero(curvature: OutputCurvature) -> bool:
    """Whether it is the number 0."""
    return isinstance(curvature, float) and curvature == 0


def rows(curvature: OutputCurvature, keep: Tensor) -> OutputCurvature:
    """The curvature at the chosen positions, (B, L, …)."""
    if isinstance(curvature, Root):
        return Root(curvature.R[:, keep])
    return curvature[:, keep] if isinstance(curvature, Tensor) else curvature


def counts(curvature: OutputCurvature) -> bool | Tensor:
    """Where it is not zero, (B, L)."""
    if isinstance(curvature, float):
        return curvature != 0
    entries = curvature.R if isinstance(curvature, Root) else curvature
    tokens = entries.flatten(-2)
    return (tokens.amax(-1) != 0) | (tokens.amin(-1) != 0)


def plus(first: OutputCurvature, second: OutputCurvature) -> OutputCurvature:
    """The sum."""
    if is_zero(first) or is_zero(second):
        return second if is_zero(first) else first
    a, b = (s.dense() if isinstance(s, Root) else s for s in (first, second))
    if isinstance(a, Tensor) == isinstance(b, Tensor):
        return a + b
    tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
    assert isinstance(tensor, Tensor)
    return tensor + number * torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)


def applied(curvature: OutputCurvature, directions: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"] | None:
    """S_i ḟ_i for directions (…, B, L, d_V), or of (B·L, d_V); None if it is zero."""
    if isinstance(curvature, float):
        return curvature * directions if curvature else None
    column = directions[..., None]
    if isinstance(curvature, Root):
        return (curvature.R @ (curvature.R.mT @ column)).squeeze(-1)
    return (curvature @ column).squeeze(-1)
