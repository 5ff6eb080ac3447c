"""Small GPTs that learn to add, with attention sinks if wanted."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig


class Sunk(nn.Module):
    """A layer's attention with a bias towards the first token."""

    def __init__(self, own: Any, sink: float) -> None:
        super().__init__()
        self.own, self.sink = own, sink

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own, with a sink."""
        own = self.own
        q, k, v = (f(x).unflatten(-1, (own.n_head, -1)).transpose(1, 2) for f in (own.q, own.k, own.v))
        bias = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        bias[:, 0] += self.sink
        mixed: Tensor = own.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return mixed


def trained(task: Addition, *, seed: int, steps: int, sink: float = 0.0, **variant: Any) -> GPT:
    """A small GPT that learns to add, in float64, from a seed."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_mlp": 16} | variant
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, **settings)).double()
    if sink:
        for block in model.h:
            block.attn = Sunk(block.attn, sink)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = task.batch(64, seed=1_000_000 * (seed + 1) + step)
        adam.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return model.eval()
