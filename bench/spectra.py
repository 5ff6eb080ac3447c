"""What estimators are measured on: symmetric matrices with stated spectra, and the Hessian of a GPT that can add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig

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
