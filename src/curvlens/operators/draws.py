"""Random tensors at the outputs. Every sample has a random stream of its own, so batching does not change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens._evaluation.graph import LossBoundary

Draw = Callable[[Any, Any, torch.Generator], Any]
"""(outputs, batch, generator) → a tree like the outputs."""

_BITS = torch.tensor([[1 << i] for i in range(8)], dtype=torch.uint8)


def drawn(boundary: LossBoundary, seed: int, draw: Draw) -> list[Tensor]:
    """The floating-point tensors of ``draw``, called sample by sample if outputs and batch can be cut."""
    size = boundary.piece.size
    if size is None or batches.batch_size(boundary.outputs) != size:
        draws = [draw(boundary.outputs, boundary.piece.batch, _generator(seed, boundary.piece.offset))]
    else:
        draws = [
            draw(
                batches.rows(boundary.outputs, i, i + 1),
                batches.rows(boundary.piece.batch, i, i + 1),
                _generator(seed, boundary.piece.offset + i),
            )
            for i in range(size)
        ]
    return [torch.cat(parts) for parts in zip(*(boundary.flat(tree) for tree in draws), strict=True)]


def signs(outputs: Any, batch: Any, generator: torch.Generator) -> Any:
    """±1 for every floating-point number; the same on every device and in every dtype."""

    def sign(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        octets = torch.randint(256, (1, -(-x.numel() // 8)), generator=generator, dtype=torch.uint8)
        bits = (octets & _BITS).flatten()[: x.numel()].view(x.shape)  # eight signs from each byte
        return (bits != 0).to(x).mul_(2).sub_(1)

    return batches.map_tensors(sign, outputs)


def _generator(seed: int, place: int) -> torch.Generator:
    """A random stream for every (seed, place). The two are hashed, because neighbouring seeds give related streams."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (place + 1) * 0xBF58476D1CE4E5B9) % 2**63
    return torch.Generator().manual_seed(mixed ^ (mixed >> 31))
