"""Random numbers of the experiments: all that a point draws comes from its seed, in one order."""

from __future__ import annotations

import torch
from torch import Tensor


class Draws:
    """Gaussian tensors in float64, one after the other, from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The next ones."""
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)
