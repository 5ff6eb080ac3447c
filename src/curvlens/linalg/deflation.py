"""The part of an operator that few vectors carry, taken out exactly, so that only the rest has to be sampled.

With an orthonormal Q and P = 1 − Q Qᵀ (`docs/explanation/math.md`, "Deflated estimators"),

- tr A = Σ_j ⟨q_j, A q_j⟩ + E ⟨P z, A P z⟩,
- ‖A‖²_F = Σ_j ‖A q_j‖² + E ‖A P z‖²,
- diag A = Σ_j q_j ∘ A q_j + E [z ∘ A P z],

for random signs z. Q is the basis of a Lanczos run, whose products are the very A q_j: nothing is multiplied twice.
None of the three needs a symmetric A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.linalg.basis import Basis
from curvlens.linalg.counted import CountedOperator
from curvlens.linalg.lanczos import Lanczos
from curvlens.linalg.probes import Probes

SETTLED = 0.1
"""A Ritz value counts as an eigenvalue when its residual is this part of it: enough to decide what to deflate."""
REPEATED = 8.0
"""More eigenvalues than one random weight suggests for a single one, but once in 200 times (χ² with one degree)."""


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
    """Whether Q spans the whole space, or all of the operator: nothing is left to sample."""

    def project(self, z: Tensor) -> Tensor:
        """P z; twice, since once leaves rounding that a large eigenvalue would blow up."""
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
    """Grow Q while the next vector saves more samples than the product it costs.

    ``samples_left(spent, outlook)`` says how many samples the rest would take or is given.
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
        if not lanczos.valid or not lanczos.size:
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
    """What one Lanczos run says about the rest, to decide with, not to report."""

    trace: float
    square: float
    """‖A‖²_F."""
    rest: float
    """‖A P‖²_F."""
    edge: float
    """The square of the largest value that is not settled yet: what one more vector may take out of the rest."""
    done: float
    """Below this the rest is rounding."""


def _outlook(lanczos: Lanczos, n: int) -> Outlook:
    """Quadrature: a Ritz value stands for n·weight eigenvalues, of which one is taken out; a settled one for itself."""
    theta, S, residuals = lanczos.ritz()
    stands_for = n * S[0].square()
    settled = residuals <= SETTLED * theta.abs()
    near = (theta[:, None] - theta).abs() <= SETTLED * theta.abs()
    repeated = settled & (stands_for > near.sum(0).clamp(min=REPEATED))
    is_open = ~settled | repeated
    left = (stands_for - near.sum(0).where(repeated, 1)).clamp(min=0).where(is_open, 0.0)
    # Of a settled value the rest still sees what its vector leaves out, which is its residual.
    squares = theta.square()
    rest = float((left * squares + residuals.square().where(settled, 0.0)).sum())
    return Outlook(
        trace=float((theta * stands_for.where(is_open, 1.0)).sum()),
        square=float(squares.sum()) + rest,
        rest=rest,
        edge=float(torch.where(is_open, squares, residuals.square()).max()),
        done=1e-28 * float(squares.sum()),
    )
