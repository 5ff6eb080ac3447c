"""Scalar attention at random weights: tokens and values are numbers, queries and keys have d_K dimensions."""

from __future__ import annotations

from torch import Tensor

from curvlens.papers.draws import Draws


def scalar_layer(seed: int, d_k: int, size: float) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """Tokens, query and key weights of a given norm, the value weight and targets.

    All of them from the stream of the seed alone: draw what is to be independent of them for a purpose.
    """
    draw = Draws(seed)
    x, y = draw(16, 10), draw(16, 10)
    q, k = draw(d_k), draw(d_k)
    return x, size * q / q.norm(), size * k / k.norm(), float(draw(1)) + 1.0, y
