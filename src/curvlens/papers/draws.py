"""Random numbers of the experiments: all that a point draws comes from its seed, each purpose in its own stream."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Draws:
    """Gaussian tensors in float64, one after the other, from a seed and a purpose.

    Two purposes of one seed are independent. Two streams of the same seed and purpose are the *same numbers*: a point
    builds each of its streams once, and what is drawn beside another function's stream gets a purpose of its own.
    Without a purpose the stream is that of the seed alone, which most points draw everything from.

    >>> first, noise = Draws(0), Draws(0, "noise")
    >>> bool((first(3) == noise(3)).any())
    False
    """

    def __init__(self, seed: int, purpose: str = "") -> None:
        self._generator = torch.Generator().manual_seed(stream(seed, purpose))

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The next ones."""
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)


def stream(seed: int, purpose: str = "") -> int:
    """The number that a stream's generator is seeded with: the seed itself, or a hash of both that never changes.

    >>> stream(3), stream(3, "tokens") == stream(3, "weights")
    (3, False)
    """
    if not purpose:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "big") & (2**63 - 1)
