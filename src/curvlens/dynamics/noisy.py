"""What gradient noise adds to the loss of an optimiser on the quadratic model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.dynamics.krylov import krylov
from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError
from curvlens.problem import Problem

DEGREE = 12
"""Products for each sample: responses up to so many steps are exact, later ones by Ritz values."""


def added_loss(
    problem: Problem,
    product: Callable[[Tensor], Tensor],
    scale: Tensor,
    respond: Callable[[Tensor, Tensor], Tensor],
    samples: int,
    seed: int,
    tick: Callable[[], None],
) -> tuple[Tensor, Tensor, int]:
    """(T,): what the noise of one sample adds to the mean loss after 1, …, T steps; its error; products.

    The noise of every step is independent, with the covariance Σ of single-sample gradients at θ. A kick e in one step
    moves x by r_s(H̃) e after s steps, so that the mean loss rises by ½ Σ_s E eᵀ r_s H̃ r_s e. Each e is a sample's own
    deviation; ``respond(T, e)`` gives r_s e for s = 1, …, in the Krylov space of e.
    """
    separated = Separated(problem, 1)
    if separated.name != "sample" or separated.count < 2:
        raise CurvlensError(
            f"batch= needs the gradients of single samples; this data has {separated.count} of one {separated.name} "
            "each. Leave batch out, or give data with a common first axis and a loss that does not couple samples."
        )
    count, used = separated.count, min(samples, separated.count)
    sums, tokens = torch.zeros(problem.layout.size, dtype=torch.float64, device=problem.device), list[float]()

    def add(gradient: Tensor, c: float) -> None:
        sums.add_(gradient)
        tokens.append(c)

    separated.each(range(count), add)
    total = sum(tokens)
    g, chosen = sums / total, torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:used].tolist()
    kicks = list[Tensor]()
    separated.each(frozenset(chosen), lambda S, c: kicks.append(scale * (count / total) * (S - c * g)))
    rises, products = list[Tensor](), 0
    dtype = problem.dtype if problem.dtype.itemsize >= 4 else torch.float32
    for kick in kicks:
        space = krylov(product, [kick.to(dtype)], DEGREE, tick)
        products += space.products
        r = respond(space.T, space.starts[:, 0])
        rises.append(0.5 * torch.einsum("ti,ij,tj->t", r, space.T, r).cumsum(0))
    found = torch.stack(rises) * (count / (count - 1))  # Σ with n − 1
    return found.mean(0), found.std(0) / used**0.5, products
