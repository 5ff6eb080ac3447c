"""Random vectors: vector i of a seed is the same on every device, in every dtype and for any number of vectors.

They come from a counter-based generator on the CPU with a stream for each (seed, purpose, index). They are made in
float64 (signs are exact in every dtype) and then cast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.linalg.vectors import LONG, norm

SIGNS, SPHERE, FRESH = 0, 1, 2
"""Purposes of vectors; each has its own streams."""
PORTION = 1 << 20
"""How many numbers are drawn at a time; even, because two come from one draw of bits."""


class Probes:
    """Seeded vectors of one length."""

    def __init__(self, n: int, seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise CurvlensError(f"seed={seed!r}, expected a whole number, 0 or more.")
        self.n, self.seed = n, int(seed)
        self.dtype, self.device = dtype, device

    def _stream(self, purpose: int, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, purpose, index])))

    def signs(self, index: int) -> Tensor:
        """±1 with equal probability."""
        bits = np.frombuffer(self._stream(SIGNS, index).bytes((self.n + 7) // 8), dtype=np.uint8)
        values = np.unpackbits(bits, count=self.n).astype(np.int8) * 2 - 1
        return torch.from_numpy(values).to(device=self.device, dtype=self.dtype)

    def direction(self, index: int, purpose: int = SPHERE) -> Tensor:
        """Uniform on the unit sphere."""
        stream = self._stream(purpose, index)
        return self._filled(lambda size: torch.from_numpy(stream.standard_normal(size)))

    def fresh(self, index: int) -> Tensor:
        """A unit vector to begin a search with.

        Up to 4 million numbers it is uniform on the sphere. Beyond, its entries are uniform in an interval, which takes
        a quarter of the time (30 million: 0.13 s, not 0.45 s). They have 2³² values, so no eigenvector is missed.
        """
        if self.n <= LONG:
            return self.direction(index, FRESH)
        bits = self._stream(FRESH, index).bit_generator
        return self._filled(lambda size: torch.from_numpy(bits.random_raw((size + 1) // 2).view(np.int32)[:size]))

    def _filled(self, draw: Callable[[int], Tensor]) -> Tensor:
        """A unit vector whose entries are drawn in portions, so that it is never whole in float64."""
        result = torch.empty(self.n, dtype=self.dtype if self.n > PORTION else torch.float64)
        for start in range(0, self.n, PORTION):
            size = min(PORTION, self.n - start)
            result[start : start + size] = draw(size)
        return result.div_(norm(result)).to(device=self.device, dtype=self.dtype)
