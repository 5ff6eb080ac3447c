"""Random numbers of the experiments: all that a point draws comes from its seed, in one order."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Draws:
    """Gaussian tensors in float64, one after the other, from a seed.

    Draws of one seed for two purposes are independent; two `Draws` of one seed and one purpose are the same.
    """

    def __init__(self, seed: int, purpose: str = "") -> None:
        self._generator = torch.Generator().manual_seed(stream(seed, purpose))

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The next ones."""
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)


def stream(seed: int, purpose: str = "") -> int:
    """The seed of a generator for one purpose; without a purpose it is the seed itself.

    >>> stream(3), stream(3, "tokens") == stream(3, "weights")
    (3, False)
    """
    if not purpose:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "big") & (2**63 - 1)
