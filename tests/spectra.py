"""Symmetric matrices with chosen spectra, in a random orthonormal frame."""

from __future__ import annotations

import torch
from torch import Tensor

N = 300


def matrix(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """Q diag(λ) Qᵀ, exactly symmetric."""
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    A = Q @ torch.diag(eigenvalues.double()) @ Q.T
    return torch.add(A, A.T) / 2


def spectra(n: int = N) -> dict[str, Tensor]:
    """The ones that eigensolvers and densities trip over."""
    generator = torch.Generator().manual_seed(5)
    bulk = torch.rand(n - 6, generator=generator, dtype=torch.float64)
    thrice = torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    wide = torch.linspace(1, 2, n // 2, dtype=torch.float64)
    return {
        "cluster": torch.cat([torch.linspace(0, 1, n - 5), 1.5 + 1e-6 * torch.arange(5)]).double(),
        "plus and minus": torch.cat([wide, -wide]),
        "triples over zeros": torch.cat([torch.zeros(n - 6), thrice]).double(),
        "triples over a bulk": torch.cat([bulk, thrice]),
        "triples at both ends": torch.cat([bulk, thrice * torch.tensor([1, 1, 1, -1, -1, -1])]),
        "condition 1e12": torch.logspace(-12, 0, n, dtype=torch.float64),
        "rank one": torch.cat([torch.zeros(n - 1), torch.ones(1)]).double(),
        "zero": torch.zeros(n, dtype=torch.float64),
        "identity": torch.ones(n, dtype=torch.float64),
    }


def tiny() -> dict[str, Tensor]:
    """One, two and three rows."""
    return {
        "n = 1": torch.tensor([2.0]).double(),
        "n = 2": torch.tensor([2.0, -1.0]).double(),
        "n = 3": torch.tensor([1.0, 1.0, -1.0]).double(),
    }


def sampled(n: int = 500) -> dict[str, Tensor]:
    """Four matrices for estimators: what is left to sample differs by orders of magnitude."""
    one = torch.ones(1, dtype=torch.float64)
    flat = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    return {
        "flat": flat,
        "decaying": torch.arange(1, n + 1, dtype=torch.float64) ** -1.0,
        "one dominant": torch.cat([100 * one, flat[1:]]),
        "indefinite": torch.cat([torch.linspace(-1, 1, n - 1, dtype=torch.float64), 0.5 * one]),
    }
