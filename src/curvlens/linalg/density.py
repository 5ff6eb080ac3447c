"""The spectral density by stochastic Lanczos quadrature, or from all eigenvalues if that is cheaper.

A random direction v has a spectral measure Σ ⟨v, x_i⟩² δ(λ_i), and its mean over directions is the density; m Lanczos
steps from v give its Gauss quadrature. The weights of random directions follow a Dirichlet law for every operator. So
the distribution of the error is known and need not be estimated from few probes. (`docs/explanation/math.md`,
"Spectral density")
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.interrupts import must_be_whole
from curvlens.linalg.basis import Basis, BasisPlace, budget
from curvlens.linalg.counted import CountedOperator, warn, whole
from curvlens.linalg.lanczos import Lanczos
from curvlens.memory import readable
from curvlens.operators.base import Progress
from curvlens.results import Density, Status
from curvlens.results.measure import Measure, line_area
from curvlens.surroundings import as_found

logger = logging.getLogger("curvlens")

SETTLED = 1e-6
"""A Ritz value with a residual below this share of the norm counts as an eigenvalue and is drawn as an atom."""
SIMULATIONS = 2000
FEWEST = 10
"""The fewest steps for which a density and its error mean something."""


@as_found
def density(
    operator: Any,
    *,
    probes: int = 4,
    steps: int = 100,
    seed: int = 0,
    exact: bool | None = None,
    memory: int | float | str | None = None,
    store: BasisPlace = "device",
    progress: Progress | None = None,
) -> Density:
    """The spectral density from ``probes`` Lanczos runs of ``steps`` products, with its error.

    The cost is probes × steps products, 400 by default (a product with H takes about two gradients), and the memory of
    ``steps`` vectors. For a first look use ``probes=2, steps=25``: 50 products. The logger ``curvlens`` announces
    products and memory before the first product, and the time that is left after the second.

    With no more rows than products (or ``exact=True``) all eigenvalues are computed instead, from one product for each
    row. Ctrl-C ends it with the probes that are done.

    Args:
        operator: any symmetric operator.
        probes: random directions. More of them make the sampling error smaller.
        steps: Lanczos steps from each direction, 10 or more. More of them resolve more of the spectrum.
        seed: of the directions.
        exact: True computes all eigenvalues, False never does.
        memory: bytes for the vectors of one run, such as ``"4GiB"``.
        store: where these vectors are: ``"device"``, ``"cpu"`` or a folder.
        progress: ``progress(done, total)`` is called after each product.

    >>> result = density(torch.diag(torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64)))
    >>> result.atoms(), result.exact
    ([(0.0, 0.75), (2.0, 0.25)], True)
    """
    for name, value in (("probes", probes), ("steps", steps)):
        if not whole(value) or value < 1:
            raise CurvlensError(f"{name}={value!r}, expected a whole number, 1 or more.")
    products = CountedOperator(operator, symmetric=True, progress=progress, seed=seed)
    n = products.n
    if exact or (exact is None and n <= probes * steps):
        return _full(products, seed)
    steps = min(steps, n)
    if steps < min(FEWEST, n):
        raise CurvlensError(f"steps={steps}, expected {FEWEST} or more: with fewer, the error of a density is unknown.")
    room = budget(memory, store, products.device) // (n * products.dtype.itemsize) - 4
    if room < steps:
        raise CurvlensError(
            f"{steps} Lanczos steps on vectors of {n} numbers do not fit: there is memory for {max(room, 0)}. Raise "
            "memory=, give fewer steps=, or keep the basis in a file: store='some/folder'."
        )
    products.total = products.count + probes * steps
    size = readable(steps * n * products.dtype.itemsize)
    logger.info("density: %d probes of %d steps, %d products, %s of a basis", probes, steps, probes * steps, size)
    basis = Basis(steps, n, dtype=products.dtype, device=products.device, store=store)
    runs: list[Run] = []
    status, note = Status.SAMPLED, ""
    try:
        for i in range(probes):
            runs.append(_quadrature(products, basis, steps, seed, i))
    except KeyboardInterrupt:
        if must_be_whole() or not runs:
            raise
        status, note = Status.INTERRUPTED, f"interrupted after {len(runs)} of {probes} probes"
        warn(f"The density was {note}; its error is for the probes that were done.")
    return replace(_density(products, runs, seed, steps), status=status, note=note)


@dataclass(frozen=True)
class Run:
    """The quadrature of one random direction."""

    theta: Tensor
    weights: Tensor
    settled: Tensor
    """Which nodes count as eigenvalues."""
    coarse: tuple[Tensor, Tensor]
    """Nodes and weights after half of the steps."""


def _quadrature(products: CountedOperator, basis: Basis, steps: int, seed: int, i: int) -> Run:
    """Lanczos steps from one random direction, until its space is invariant."""
    probes = products.probes(seed)
    lanczos = Lanczos(products, basis, probes.direction(i), probes)
    while lanczos.size < steps:
        lanczos.step()
        if lanczos.exhausted or lanczos.broke_down:
            break
    theta, S, residuals = lanczos.ritz()
    half = max(lanczos.size // 2, 1) if not lanczos.broke_down else lanczos.size
    coarse, R = torch.linalg.eigh(lanczos.T[:half, :half])
    return Run(theta, S[0].square(), residuals <= SETTLED * lanczos.norm, (coarse, R[0].square()))


def _density(products: CountedOperator, runs: list[Run], seed: int, steps: int) -> Density:
    count = len(runs)
    pieces = [_picture(run.theta, run.weights, run.settled) for run in runs]
    measure = Measure(
        torch.cat([p.lower for p in pieces]),
        torch.cat([p.upper for p in pieces]),
        torch.cat([p.mass for p in pieces]) / count,
    )
    rounding = 10 * products.eps * max(float(run.theta.abs().max()) for run in runs)
    resolution = sum(_resolution(run.theta, run.weights, run.settled) for run in runs) / count
    return Density(
        nodes=torch.cat([run.theta for run in runs]),
        weights=torch.cat([run.weights for run in runs]) / count,
        probe=torch.cat([torch.full((len(run.theta),), i) for i, run in enumerate(runs)]),
        settled=torch.cat([run.settled for run in runs]),
        coarse_nodes=torch.cat([run.coarse[0] for run in runs]),
        coarse_weights=torch.cat([run.coarse[1] for run in runs]) / count,
        lower=measure.lower,
        upper=measure.upper,
        mass=measure.mass,
        n=products.n,
        probes=count,
        error=_sampling_error(measure, products.n, count, seed) + resolution + rounding,
        products=products.count,
        provenance=products.provenance(seed=seed, probes=count, steps=steps),
    )


def _picture(theta: Tensor, weights: Tensor, settled: Tensor) -> Measure:
    """Spread half of an unsettled node's mass to either side, as far as `_reach`; draw a settled node as an atom."""
    right, left = _reach(theta, weights, settled)
    lower = torch.cat([theta, theta - left])
    upper = torch.cat([theta + right, theta])
    return Measure(lower, upper, torch.cat([weights, weights]) / 2)


def _reach(theta: Tensor, weights: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
    """The distance over which the mass of each node spreads to the right and to the left.

    Between two unsettled nodes of similar weight the density is smooth, and mass spreads to the neighbour. A heavy node
    beside a light one is a narrow bulk: it spreads so far that its density is no higher than the neighbour's.
    """
    gap = theta.diff() * (~settled[:-1] & ~settled[1:])
    ratio = weights[1:] / weights[:-1].clamp(min=1e-300)
    zero = theta.new_zeros(1)
    right = torch.cat([gap * ratio.clamp(max=1), zero])
    left = torch.cat([zero, gap * (1 / ratio.clamp(min=1e-300)).clamp(max=1)])
    narrow = 1e-9 * theta.abs().max()  # smaller distances are rounding
    return right.where(right > narrow, 0.0), left.where(left > narrow, 0.0)


def _resolution(theta: Tensor, weights: Tensor, settled: Tensor) -> float:
    """The possible distance of the drawn density from the true one: 1/8 of the spread, more for few nodes."""
    right, left = _reach(theta, weights, settled)
    return float((weights * (right + left)).sum()) / 16 * (1 + FEWEST / len(theta))


def _sampling_error(measure: Measure, n: int, probes: int, seed: int) -> float:
    """The 95 % quantile of ∫ |F̂ − F|: √(nN/2) (F̂ − F) is a Brownian bridge B run by F.

    F̂ replaces F in it. It knows nothing of eigenvalues that all directions missed, so 1/(nN) is added to the variance
    for them.
    """
    x = measure.breaks()
    if len(x) < 2:
        return 0.0
    if len(x) > 1000:
        x = x[torch.linspace(0, len(x) - 1, 1000).long()]
    # Values just right of every break and just left of the next; F is linear between them.
    F = torch.stack([measure.cdf(x[:-1]), measure.cdf(x[1:], before=True)], dim=1).clamp(0, 1).reshape(-1)
    F = torch.cat([F.cummax(0).values, F.new_ones(1)])
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SIMULATIONS, len(F) + 1, generator=generator, dtype=torch.float64)
    walk = (noise[:, :-1] * F.diff(prepend=F.new_zeros(1)).sqrt()).cumsum(1)
    bridge = walk - F * walk[:, -1:] + noise[:, -1:] / math.sqrt(n * probes)
    area = (line_area(bridge[:, :-1:2], bridge[:, 1::2]) * x.diff()).sum(1)
    return math.sqrt(2 / ((n + 2) * probes)) * float(area.quantile(0.95))


def _full(products: CountedOperator, seed: int) -> Density:
    """All eigenvalues, from the dense matrix."""
    n = products.n
    logger.info("density: all %d eigenvalues, %d products, %s of a matrix", n, n, readable(n * n * 8))
    matrix = torch.stack([column.double().cpu() for column in products.columns()])
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    weights = torch.full_like(values, 1 / n)
    return Density(
        nodes=values,
        weights=weights,
        probe=torch.zeros(n, dtype=torch.long),
        settled=torch.ones(n, dtype=torch.bool),
        coarse_nodes=values,
        coarse_weights=weights,
        lower=values,
        upper=values,
        mass=weights,
        n=n,
        probes=0,
        error=0.0,
        products=products.count,
        provenance=products.provenance(seed=seed, probes=0),
    )
