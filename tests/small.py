"""Small problems that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.models import GPT, GPTConfig


def gpt(seed: int = 0, **options: Any) -> GPT:
    """A float64 GPT of some hundred parameters, in evaluation mode, norms and biases away from their defaults."""
    torch.manual_seed(seed)
    sizes = {"vocab": 7, "context": 6, "n_layer": 1, "n_head": 2, "d_model": 4, "d_mlp": 6}
    model = GPT(GPTConfig(**{**sizes, **options})).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.3)
    return model


def tokens_and_labels(n: int = 5, length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, where every sequence has another number of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (n, length), generator=generator)
    labels = torch.randint(7, (n, length), generator=generator)
    for i in range(n):
        labels[i, 1 + i % length :] = -100
    return tokens, labels


def problem(**options: Any) -> cl.Problem:
    """The GPT on five padded sequences."""
    return cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), **options)


def direction(size: int, seed: int = 1) -> Tensor:
    """A random vector."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/‖b‖."""
    return float((a - b).norm() / b.norm())


class Cell(nn.Module):
    """A layer of `Cells`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n, self.sa, self.ff = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.ff(torch.tanh(self.sa(self.n(x))))
        return mixed


class Cells(nn.Module):
    """An architecture that curvlens does not know, with a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.to_vocab = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.cells = nn.ModuleList(Cell(4) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for cell in self.cells:
            x = cell(x)
        out: Tensor = self.to_vocab(x)
        return out


def cells(**options: Any) -> cl.Problem:
    """A problem with an architecture that curvlens does not know."""
    torch.manual_seed(0)
    return cl.Problem(Cells().double(), torch.randint(7, (3, 5)), cl.losses.CausalLM(), **options)
