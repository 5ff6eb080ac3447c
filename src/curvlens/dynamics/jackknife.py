"""The covariance of gradients, its trace and the noise scale, with the error from leaving out one sample at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.results import Estimate


@dataclass(frozen=True)
class Terms:
    """What the estimates are made of, for an inner product ⟨·, ·⟩: the plain one, that of a block, or that of H.

    a = ⟨d_i, d_i⟩, b = ⟨d_i, g⟩, r = ⟨d_i, w⟩ with w = Σ c_i d_i, all of shape (n, blocks); q = ⟨g, g⟩ by block; c_i.
    """

    a: Tensor
    b: Tensor
    r: Tensor
    q: Tensor
    c: Tensor

    def of(self, column: int) -> Terms:
        """One block."""
        pick = slice(column, column + 1)
        return Terms(self.a[:, pick], self.b[:, pick], self.r[:, pick], self.q[pick], self.c)

    def whole(self) -> Terms:
        """All blocks together."""
        a, b, r = (x.sum(1, keepdim=True) for x in (self.a, self.b, self.r))
        return Terms(a, b, r, self.q.sum(0, keepdim=True), self.c)

    def estimates(
        self, size: float, samples: int, about: dict[str, Any], unknown: str, *, definite: bool = True
    ) -> tuple[Estimate, Estimate, Estimate]:
        """tr Σ, ‖g‖² and their ratio, of one block; ``unknown`` says why there is none where ‖g‖² is not above 0.

        What cannot be below 0 has its interval on the logarithm. With an indefinite H that is the ratio alone.
        """
        a, b, r, q, c = self.a[:, 0], self.b[:, 0], self.r[:, 0], self.q[0], self.c
        n, C = len(c), c.sum()
        trace = (n / C) ** 2 / (n - 1) * a.sum()
        square = q - trace / n
        # The same without sample i: g − d_i/C', d_j + c_j d_i/C'.
        rest = C - c
        sums = a.sum() - a + 2 / rest * (r - c * a) + a / rest**2 * (c.square().sum() - c.square())
        traces = ((n - 1) / rest) ** 2 / (n - 2) * sums
        squares = q - 2 * b / rest + a / rest**2 - traces / (n - 1)
        ratio = trace / square if square > 0 else torch.full_like(trace, math.nan)
        ratios = (traces - ratio * squares) / square  # to first order: one that is left out may make ‖g‖² negative

        def estimate(value: Tensor, others: Tensor, positive: bool, note: str = "") -> Estimate:
            error = ((n - 1) / n * (others - others.mean()).square().sum()).sqrt()
            on_log = positive and bool(value > 0)
            return Estimate(value.cpu(), error.cpu(), samples, float(n - 1), note, dict(about), on_log)

        note = "" if square > 0 else unknown
        return (
            estimate(trace * size, traces * size, definite),
            estimate(square, squares, definite),
            estimate(ratio * size, ratios * size, True, note),
        )
