"""What is measured: the reference GPT on random tokens, in four sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlens.models import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]
"""Tokens and labels, both (samples, tokens)."""


@dataclass(frozen=True)
class Sizes:
    """Shape of a model and of its one batch."""

    n_layer: int
    d_model: int
    n_head: int
    context: int
    batch: int
    vocab: int

    def __str__(self) -> str:
        return (
            f"{self.n_layer}-layer GPT, d {self.d_model}, {self.n_head} heads, {self.context} tokens, "
            f"batch {self.batch}, vocabulary {self.vocab}"
        )


FULL = Sizes(n_layer=6, d_model=384, n_head=6, context=256, batch=4, vocab=5000)
MIDDLE = Sizes(n_layer=4, d_model=96, n_head=4, context=64, batch=4, vocab=500)
"""For what needs thousands of products."""
QUICK = Sizes(n_layer=2, d_model=32, n_head=2, context=32, batch=4, vocab=100)
SMALL = Sizes(n_layer=2, d_model=8, n_head=2, context=6, batch=4, vocab=11)
"""Small enough for a dense Hessian in float64, deep enough that rows lie upstream of a norm."""


def make_model(sizes: Sizes, dtype: torch.dtype = torch.float32) -> GPT:
    """The reference GPT with separate q, k, v, o, up and down, pre-LN and biases, always with the same weights."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab=sizes.vocab,
        context=sizes.context,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        d_model=sizes.d_model,
    )
    return GPT(config).to(dtype).eval()


def make_batch(sizes: Sizes) -> Batch:
    """Random tokens and random labels."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(sizes.vocab, (2, sizes.batch, sizes.context), generator=generator)
    return x, y


def block_names(sizes: Sizes) -> list[str]:
    """The weight matrices of all layers."""
    parts = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    return [f"h.{layer}.{part}.weight" for layer in range(sizes.n_layer) for part in parts]


class TokenLoss(nn.CrossEntropyLoss):
    """Mean cross-entropy over the tokens whose label is not -100."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().forward(logits.flatten(0, 1), labels.flatten())


def gradient(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """Forward and backward with whatever attention torch chooses: the unit of every cost."""
    loss = TokenLoss()(model(batch[0]), batch[1])
    return torch.autograd.grad(loss, list(model.parameters()))
