"""Deflation: the part of an operator along a few vectors is computed exactly, and only the rest is sampled.

With an orthonormal Q and P = 1 − Q Qᵀ (`docs/explanation/math.md`, "Deflated estimators"),

- tr A = Σ_j ⟨q_j, A q_j⟩ + E ⟨P z, A P z⟩,
- ‖A‖²_F = Σ_j ‖A q_j‖² + E ‖A P z‖²,
- diag A = Σ_j q_j ∘ A q_j + E [z ∘ A P z],

for random signs z. Q is the basis of a Lanczos run, which has already computed the products A q_j.
None of the three needs a symmetric A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.interrupts import must_be_whole
from curvlens.linalg.basis import Basis
from curvlens.linalg.counted import CountedOperator
from curvlens.linalg.lanczos import Lanczos
from curvlens.linalg.probes import Probes

SETTLED = 0.1
"""A Ritz value counts as an eigenvalue if its residual is below this share of it: enough to decide on deflation."""
REPEATED = 8.0
"""A settled Ritz value with n·weight above this stands for several eigenvalues. A single eigenvalue exceeds it once in
200 times (χ² with one degree of freedom)."""


@dataclass(frozen=True)
class Deflation:
    """The exact parts, and the projector P."""

    basis: Basis
    size: int
    trace: float
    square: float
    diagonal: Tensor | None
    outlook: Outlook | None
    interrupted: bool
    everything: bool
    """Whether Q spans the whole space, or the whole range of the operator, so that nothing is left to sample."""

    def project(self, z: Tensor) -> Tensor:
        """P z. Projected twice: the rounding error of one projection would be multiplied by a large eigenvalue."""
        for _ in range(2 if self.size else 0):
            self.basis.subtract(self.basis.dots(self.size, z), z)
        return z


def deflate(
    products: CountedOperator,
    basis: Basis,
    probes: Probes,
    samples_left: Callable[[int, Outlook], float],
    *,
    diagonal: bool,
) -> Deflation:
    """Grow Q while the next vector saves more samples than the one product that it costs.

    ``samples_left(spent, outlook)`` is the number of samples that the rest needs or gets.
    """
    square = 0.0
    diag = torch.zeros(products.n, dtype=torch.float64, device=products.device) if diagonal else None

    def watch(q: Tensor, Aq: Tensor) -> None:
        nonlocal square
        square += float(Aq.double().square().sum())
        if diag is not None:
            diag.add_(q.double() * Aq.double())

    if not basis.capacity:
        return Deflation(basis, 0, 0.0, 0.0, diag, None, interrupted=False, everything=False)
    outlook: Outlook | None = None
    lanczos = Lanczos(products, basis, probes.direction(0), probes, watch)
    interrupted = False
    try:
        while lanczos.size < basis.capacity:
            lanczos.step()
            if lanczos.exhausted:
                break
            if lanczos.size < 3:
                continue
            outlook = _outlook(lanczos, products.n)
            pays = outlook.edge * samples_left(lanczos.size, outlook) >= 2.0 * outlook.rest
            if outlook.rest <= outlook.done or not pays:
                break
    except KeyboardInterrupt:
        if must_be_whole() or not lanczos.valid or not lanczos.size:
            raise
        interrupted = True
    return Deflation(
        basis,
        lanczos.size,
        float(lanczos.T.diagonal()[: lanczos.size].sum()),
        square,
        diag,
        outlook,
        interrupted,
        lanczos.exhausted,
    )


@dataclass(frozen=True)
class Outlook:
    """Estimates from one Lanczos run about the rest. They are used for decisions and not reported."""

    trace: float
    square: float
    """‖A‖²_F."""
    rest: float
    """‖A P‖²_F."""
    edge: float
    """The square of the largest unsettled value: the most that one more vector can take out of the rest."""
    done: float
    """A rest below this is rounding."""


def _outlook(lanczos: Lanczos, n: int) -> Outlook:
    """By quadrature: a Ritz value stands for n·weight eigenvalues, one of them in Q; a settled value stands for one."""
    theta, S, residuals = lanczos.ritz()
    stands_for = n * S[0].square()
    settled = residuals <= SETTLED * theta.abs()
    near = (theta[:, None] - theta).abs() <= SETTLED * theta.abs()
    repeated = settled & (stands_for > near.sum(0).clamp(min=REPEATED))
    is_open = ~settled | repeated
    left = (stands_for - near.sum(0).where(repeated, 1)).clamp(min=0).where(is_open, 0.0)
    # For a settled value, the rest still contains what its vector misses: its residual.
    squares = theta.square()
    rest = float((left * squares + residuals.square().where(settled, 0.0)).sum())
    return Outlook(
        trace=float((theta * stands_for.where(is_open, 1.0)).sum()),
        square=float(squares.sum()) + rest,
        rest=rest,
        edge=float(torch.where(is_open, squares, residuals.square()).max()),
        done=1e-28 * float(squares.sum()),
    )
