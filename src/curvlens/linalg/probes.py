"""Random vectors: the i-th of a seed is the same on every device, in every dtype and however many are drawn.

They come from a counter-based generator on the CPU whose stream is keyed by (seed, purpose, index), are made in
float64 (signs are exact in every dtype) and then cast.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvlens.errors import CurvlensError

SIGNS, SPHERE, FRESH = 0, 1, 2
"""Purposes, each with streams of its own."""


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
        v = torch.from_numpy(self._stream(purpose, index).standard_normal(self.n))
        return v.div_(v.norm()).to(device=self.device, dtype=self.dtype)
