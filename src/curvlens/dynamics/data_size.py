"""How many samples are enough for the loss, the gradient or the Hessian to be settled to a tolerance?"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from scipy import special
from torch import Tensor

from curvlens.dynamics.provenance import provenance
from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError
from curvlens.linalg.counted import whole
from curvlens.operators.base import Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import DataSize, Estimate, Status
from curvlens.surroundings import as_found

Of = Literal["loss", "gradient", "hessian"]
FEWEST = 8
"""Samples of which a spread means something."""
HELD = 1 << 27
"""Numbers of gradients, or of products, that are kept for their inner products: 1 GiB."""
SETTLED = 512
"""Samples from which on the noise of their own mean is nothing beside that of the next sample."""
MOST = 1e15
"""Samples: float64 counts them one by one."""
DRAWS = 2000
"""Of an increment, for its quantile."""


@as_found
def data_size(
    problem: Problem,
    tolerance: float,
    of: Of = "loss",
    *,
    confidence: float | None = None,
    samples: int | None = None,
    probes: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> DataSize:
    """The smallest number k of samples for a tolerance, in both readings of "settled".

    Increment: one more sample moves the mean of k by no more than the tolerance, RMS σ/√(k(k+1)). Distance: the mean of
    k is within the tolerance of its limit, RMS σ/√k. An increment that falls like 1/k does not mean that the distance
    does (`docs/explanation/math.md`, "Data size").

    Args:
        problem: its samples stand for those to come; at its θ.
        tolerance: an absolute distance, not a share: in nats of the loss, of the gradient in its norm ‖·‖, of the
            Hessian in the Frobenius norm. For 5 % of it give ``0.05 * float(frobenius(hessian(problem), 32))``.
        of: "loss", "gradient" or "hessian".
        confidence: the probability with which the tolerance holds, such as 0.9. Default: as root mean square.
        samples: how many samples to measure the spread on, drawn without replacement; all by default.
        probes: random directions for norms of Hessians, with a product of every sample for each.
        seed: for all draws.
        progress: called as ``progress(done, total)`` after every sample.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x, y = torch.ones(8, 1, dtype=torch.float64), torch.arange(8, dtype=torch.float64)[:, None].sqrt()
    >>> result = data_size(Problem(model, (x, y), MSE()), 0.1)  # losses 0, 1, …, 7: σ² = 6
    >>> result.increment, result.distance
    (24, 600)
    """
    require_problem(problem, "data_size")
    if of not in get_args(Of):
        raise CurvlensError(f"of={of!r}, expected 'loss', 'gradient' or 'hessian'.")
    if not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise CurvlensError(f"tolerance={tolerance!r}, expected a number above 0, such as 0.01.")
    if confidence is not None and not 0 < confidence < 1:
        raise CurvlensError(f"confidence={confidence!r}, expected a probability between 0 and 1, such as 0.9.")
    if samples is not None and not (whole(samples) and samples >= FEWEST):
        raise CurvlensError(f"samples={samples!r}, expected a whole number, {FEWEST} or more.")
    if not (whole(probes) and probes >= 2):
        raise CurvlensError(f"probes={probes!r}, expected a whole number, 2 or more.")
    separated = Separated(problem, 1)
    used = min(samples or separated.count, separated.count)
    if separated.name != "sample" or used < FEWEST:
        raise CurvlensError(
            f"A data size needs {FEWEST} single samples at least; this data has {separated.count} of one "
            f"{separated.name} each. Give more samples, with a common first axis and a loss that does not couple them."
        )
    chosen = frozenset(torch.randperm(separated.count, generator=torch.Generator().manual_seed(seed))[:used].tolist())
    if of == "loss":
        e = deviations(separated, chosen, progress)
        sizes, dof, products = e.abs(), 1.0, Products(e[:, None])
    else:
        rows, c = (
            _gradients(separated, chosen, progress)
            if of == "gradient"
            else _hessians(separated, chosen, int(probes), seed, progress)
        )
        sizes, dof, products = _spread_out(rows, c, separated.problem.layout.size)
    variance = float(sizes.square().sum()) / (used - 1)
    ratio = _ratio(variance, float(tolerance))
    if confidence is None:  # k (k + 1) of the increment, and k of the distance
        increment, distance = math.ceil((math.sqrt(1 + 4 * ratio) - 1) / 2 - 1e-9), math.ceil(ratio - 1e-9)
    else:
        far = ratio * 2 * float(special.gammaincinv(dof / 2, confidence)) / dof  # χ²/dof: z² for one direction
        increment = _increment(products, sizes, tolerance, confidence, seed)
        distance = math.ceil(far - 1e-9)
    return DataSize(
        of=of,
        tolerance=float(tolerance),
        increment=max(increment, 1),
        distance=max(distance, 1),
        confidence=confidence,
        spread=_spread(sizes, variance),
        samples=used,
        dof=dof,
        status=Status.SAMPLED,
        provenance=provenance(problem, seed=seed),
    )


def _ratio(variance: float, tolerance: float) -> float:
    """(σ/tolerance)², if that is a number of samples."""
    sigma = math.sqrt(variance) if variance < math.inf else math.nan
    if not sigma <= math.sqrt(MOST) * tolerance:
        raise CurvlensError(
            f"tolerance={tolerance:g} would need more than {MOST:g} samples: one sample is off by σ = {sigma:.3g}. "
            f"Give a larger tolerance, such as {sigma / 100:.1g}."
        )
    return (sigma / tolerance) ** 2


@dataclass(frozen=True)
class Products:
    """Inner products of the deviations e_i: as their rows, or as their Gram matrix."""

    rows: Tensor | None = None
    gram: Tensor | None = None

    def lengths(self, weights: Tensor) -> Tensor:
        """‖Σ_i w_i e_i‖ for each row of weights."""
        if self.rows is not None:
            return (weights @ self.rows).square().sum(1).sqrt()
        assert self.gram is not None
        return ((weights @ self.gram) * weights).sum(1).clamp(min=0).sqrt()


def _increment(products: Products, sizes: Tensor, tolerance: float, confidence: float, seed: int) -> int:
    """The smallest k with |l_{k+1} − L_k|/(k + 1) within the tolerance, so often; by drawing k + 1 of the samples."""

    def holds(k: int) -> bool:
        if k >= SETTLED:
            return float(sizes.quantile(confidence)) <= tolerance * (k + 1)
        generator, n = torch.Generator().manual_seed(seed), len(sizes)
        mean = torch.randint(n, (DRAWS, k), generator=generator)
        weights = torch.zeros(DRAWS, n, dtype=torch.float64)
        weights.scatter_add_(1, mean, torch.full(mean.shape, -1 / k, dtype=torch.float64))
        one = torch.randint(n, (DRAWS, 1), generator=generator)
        weights.scatter_add_(1, one, torch.ones(one.shape, dtype=torch.float64))
        return float(products.lengths(weights).quantile(confidence)) <= tolerance * (k + 1)

    low, high = 0, 1
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _spread(sizes: Tensor, variance: float) -> Estimate:
    """σ, with the error of a root mean square."""
    sigma, n = math.sqrt(variance), len(sizes)
    error = float(sizes.square().std()) / math.sqrt(n) / (2 * sigma) if sigma else 0.0
    value, stderr = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (sigma, error))
    return Estimate(value, stderr, n, dof=n - 1, provenance={"samples": "samples"}, positive=True)


def deviations(separated: Separated, chosen: frozenset[int], progress: Progress | None) -> Tensor:
    """e_i = (n/C)(S_i − c_i L): what each sample adds to the mean, as a quotient of sums."""
    sums, counts = list[float](), list[float]()
    evaluation = separated.evaluation
    with torch.no_grad(), evaluation.isolated():
        for place, piece in enumerate(evaluation.pieces()):
            if place in chosen:
                total, count = evaluation.passed(piece)
                sums.append(total.item())
                counts.append(count)
                if progress is not None:
                    progress(len(sums), len(chosen))
    S, c = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (sums, counts))
    return len(c) / _positive(c) * (S - c * S.sum() / c.sum())


def _gradients(separated: Separated, chosen: frozenset[int], progress: Progress | None) -> tuple[Tensor, Tensor]:
    """The summed gradient of each sample, as rows, and its tokens."""
    gradients, counts = list[Tensor](), list[float]()
    _require_room(len(chosen), separated.problem.layout.size, "gradients")

    def add(gradient: Tensor, count: float) -> None:
        gradients.append(gradient)
        counts.append(count)
        if progress is not None:
            progress(len(counts), len(chosen))

    separated.each(chosen, add)
    S = torch.stack(gradients)
    return S, torch.tensor(counts, dtype=torch.float64, device=S.device)


def _hessians(
    separated: Separated, chosen: frozenset[int], probes: int, seed: int, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """The summed Hessian of each sample times z/√m for m random z, one after the other in a row: their inner products
    are those of the Hessians, without bias. And its tokens.
    """
    layout, evaluation = separated.problem.layout, separated.evaluation
    _require_room(len(chosen), layout.size * probes, "products")
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(2, (probes, layout.size), generator=generator, device="cpu") * 2 - 1
    directions = [layout.unflatten(each) for each in z.to(evaluation.device, separated.problem.dtype)]
    S = torch.zeros(len(chosen), probes, layout.size, dtype=torch.float64, device=evaluation.device)
    counts = list[float]()
    with torch.enable_grad(), closing(evaluation.cache.some(layout.names, chosen)) as graphs:
        for graph in graphs:
            for j, v in enumerate(directions):
                found = graph.second(layout.names, v, functional=False, retain=True)
                S[len(counts), j] = separated.flat(found)
            counts.append(graph.count)
            if progress is not None:
                progress(len(counts), len(chosen))
    c = torch.tensor(counts, dtype=torch.float64, device=S.device)
    return S.flatten(1) / math.sqrt(probes), c


def _require_room(samples: int, size: int, what: str) -> None:
    if samples * size > HELD:
        raise CurvlensError(
            f"{samples} {what} of {size:,} numbers are more than 1 GiB. Give fewer: "
            f"samples={max(HELD // size, FEWEST)}."
        )


def _spread_out(S: Tensor, c: Tensor, size: int) -> tuple[Tensor, float, Products]:
    """‖e_i‖, the directions that the noise is spread over, and inner products, of summed rows S_i with tokens c_i."""
    n = len(c)
    e = n / _positive(c) * (S - c[:, None] * (S.sum(0) / c.sum()))
    gram = e @ e.T
    squares = gram.diagonal()
    trace = float(squares.sum()) / (n - 1)
    between = float(gram.square().sum() - squares.square().sum()) / (n * (n - 1))  # E⟨e_i, e_j⟩² = tr Σ²
    dof = min(max(trace**2 / between, 1.0), float(size)) if between > 0 else float(size)
    return squares.sqrt().cpu(), dof, Products(gram=gram.cpu())


def _positive(c: Tensor) -> float:
    total = float(c.sum())
    if not total:
        raise CurvlensError("None of the drawn samples has a token that counts. Draw more of them.")
    return total
