"""What is measured: the reference GPT on random tokens, in four sizes; and matrices whose spectrum is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
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
FEW_TOKENS = replace(FULL, batch=1, context=32)
"""Vectors of the full length, and products that cost little."""
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


def model_and_batch(sizes: Sizes) -> tuple[GPT, Batch]:
    """Model and batch in float32."""
    return make_model(sizes), make_batch(sizes)


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


def join(parts: Sequence[Tensor]) -> Tensor:
    """Tensors laid end to end."""
    return torch.cat([part.reshape(-1) for part in parts])


def split(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of some tensors."""
    parts = v.split([p.numel() for p in like])  # type: ignore[no-untyped-call]
    return [part.view_as(p) for part, p in zip(parts, like, strict=True)]


def count(model: nn.Module) -> int:
    """How many parameters."""
    return sum(p.numel() for p in model.parameters())


# Matrices

N = 500


def matrix(eigenvalues: Tensor) -> Tensor:
    """Q diag(λ) Qᵀ in a random frame."""
    generator = torch.Generator().manual_seed(0)
    n = len(eigenvalues)
    Q: Tensor = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return Q @ torch.diag(eigenvalues.double()) @ Q.T


def sampled() -> dict[str, Tensor]:
    """Four spectra of 500 eigenvalues for trace estimators."""
    flat = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    indices = torch.arange(1, N + 1, dtype=torch.float64)
    return {
        "flat: 0.5 … 1.5": matrix(flat),
        "decaying: 1/i": matrix(1 / indices),
        "steep: 0.9^i": matrix(0.9**indices),
        "one dominant: 100 over flat": matrix(torch.cat([flat[:1] * 200, flat[1:]])),
    }


def ends() -> dict[str, Tensor]:
    """Spectra of 500 eigenvalues whose largest five are asked for."""
    bulk = torch.linspace(0, 1, N - 5, dtype=torch.float64)
    return {
        "outliers 2, 3, 4, 5, 6 over a bulk": matrix(torch.cat([bulk, torch.arange(2.0, 7.0)])),
        "decaying: 1/i": matrix(1 / torch.arange(1, N + 1, dtype=torch.float64)),
        "a triple and a pair over a bulk": matrix(torch.cat([bulk, torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])])),
    }


def gpt_hessian(quick: bool) -> Tensor:
    """The dense float64 Hessian of a one-layer GPT that was trained to add for some seconds."""
    torch.manual_seed(0)
    size = 4 if quick else 10
    model = GPT(GPTConfig(vocab=12, context=17, n_layer=1, n_head=1, d_model=size, d_mlp=3 * size))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30 if quick else 400):
        tokens, labels = Addition().batch(64, seed=step + 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    problem = cl.Problem(model.double().eval(), Addition().batch(32, seed=0), cl.losses.CausalLM(shift=False))
    H = cl.hessian(problem).dense()
    return torch.add(H, H.T) / 2
