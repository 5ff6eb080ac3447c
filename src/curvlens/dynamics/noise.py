"""How noisy is the gradient of one sample?

Sample i of n has the summed loss S_i and c_i tokens, C = Σ c_i. The gradient g = Σ ∇S_i / C is a ratio of sums,
so that sample i stands for g_i = g + e_i, e_i = (n/C) d_i, d_i = ∇S_i − c_i g: their mean is g, and Σ is their
covariance (`docs/explanation/math.md`, "Noise").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from curvlens.dynamics.jackknife import Terms
from curvlens.dynamics.provenance import provenance
from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError
from curvlens.linalg.counted import whole
from curvlens.operators import hessian
from curvlens.operators.base import Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import ByBlock, Estimate, Noise, Status
from curvlens.study.budget import Budget, parse_budget
from curvlens.surroundings import as_found

FEWEST = 3
"""Gradients of which one can be left out, with a covariance of the rest."""
HELD = 1 << 24
"""Numbers of the gradients that wait for their products: 128 MiB."""


@as_found
def noise(
    problem: Problem,
    *,
    samples: int | None = None,
    curvature: bool = False,
    micro_batch: int = 1,
    seed: int = 0,
    budget: str | float | Budget | None = None,
    progress: Progress | None = None,
) -> Noise:
    """The covariance Σ of single-sample gradients, and the noise scale tr Σ/‖g‖².

    Estimates for the population of the data: Σ with n − 1, ‖g‖² less its own noise tr Σ/n. Samples count by their
    tokens, as in the loss: g_i = g + (n/C)(∇S_i − c_i g). Errors are jackknife errors, with one sample left out at a
    time. Each sample goes through the model twice.

    Args:
        problem: the loss.
        samples: how many samples, drawn without replacement; all of them by default. g is then that of the drawn ones.
        curvature: also tr(HΣ) and tr(HΣ)/gᵀHg, with the Hessian of the whole problem: a product for each sample.
        micro_batch: samples in one gradient; Σ is scaled to one sample. Batches that cannot be cut (the loss couples
            their samples, or they have no common first axis) have one gradient each.
        seed: for the draw.
        budget: a time or a cost, ``"2m"`` or ``"20 gradients"``: fewer samples are drawn to keep it.
        progress: called as ``progress(done, total)`` after every sample.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x, y = torch.ones(4, 1, dtype=torch.float64), torch.tensor([[1.0], [2.0], [3.0], [2.0]], dtype=torch.float64)
    >>> result = noise(Problem(model, (x, y), MSE()))  # gradients −2y: variance 4 · 2/3
    >>> round(float(result.trace), 9), round(float(result.gradient), 9)  # 16 − (8/3)/4
    (2.666666667, 15.333333333)
    """
    require_problem(problem, "noise")
    for name, value in (("samples", samples), ("micro_batch", micro_batch)):
        if value is not None and not (whole(value) and value >= 1):
            raise CurvlensError(f"{name}={value!r}, expected a whole number, 1 or more.")
    separated = Separated(problem, micro_batch)
    count, asked = separated.count, min(samples or separated.count, separated.count)
    allowed = separated.allowed(parse_budget(budget), curvature)
    n = min(asked, allowed)
    if n < FEWEST:
        why = f"budget={budget!r} allows {n}" if allowed < asked else f"there are {n}"
        raise CurvlensError(
            f"A covariance and its error need {FEWEST} {separated.name} gradients at least; {why}. Give more samples, "
            "or a larger budget."
        )
    draw = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:n].tolist()
    plain, curved = _measured(separated, frozenset(draw), curvature, progress)
    about = provenance(problem, seed=seed)
    size = separated.size

    def estimates(terms: Terms) -> tuple[Estimate, Estimate, Estimate]:
        return terms.estimates(size, n, about)

    by_block = {name: estimates(plain.of(column)) for column, name in enumerate(problem.blocks)}
    trace, square, scale = estimates(plain.whole())
    hessian_numbers = (None, None, None) if curved is None else estimates(curved.whole())
    reduced = n < asked
    return Noise(
        trace=trace,
        gradient=square,
        scale=scale,
        traces=ByBlock({name: three[0] for name, three in by_block.items()}, "trace"),
        scales=ByBlock({name: three[2] for name, three in by_block.items()}, "noise scale"),
        samples=n,
        each=separated.name,
        size=size,
        status=Status.STOPPED_AT_BUDGET if reduced else Status.SAMPLED,
        curvature_trace=hessian_numbers[0],
        curvature_gradient=hessian_numbers[1],
        curvature_scale=hessian_numbers[2],
        products=n + 2 if curvature else 0,
        note=f"budget={budget!r} allowed {n} of {asked} {separated.name} gradients" if reduced else "",
        provenance=about,
    )


def _measured(
    separated: Separated, only: frozenset[int], curvature: bool, progress: Progress | None
) -> tuple[Terms, Terms | None]:
    """Two passes over the drawn samples: their sums, then their products with g and with each other."""
    problem = separated.problem
    total = 2 * len(only)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    sums = torch.zeros(2, problem.layout.size, dtype=torch.float64, device=problem.device)
    counts = list[float]()

    def add(gradient: Tensor, count: float) -> None:
        sums[0] += gradient
        sums[1] += count * gradient
        counts.append(count)
        tick()

    separated.each(only, add)
    c = torch.tensor(counts, dtype=torch.float64, device=problem.device)
    if int((c > 0).sum()) < FEWEST - 1:
        raise CurvlensError("Fewer than two of the drawn samples have a token that counts. Draw more of them.")
    g = sums[0] / c.sum()
    w = sums[1] - c.square().sum() * g
    H = hessian(problem)

    def product(v: Tensor) -> Tensor:
        applied: Tensor = H @ v.to(problem.dtype)
        return applied.double()

    Hg, Hw = (product(g), product(w)) if curvature else (g, w)
    plain, curved = list[Tensor](), list[Tensor]()
    index = _blocks(problem)
    drawn: list[Tensor] = []

    def multiply(gradient: Tensor, count: float) -> None:
        d = gradient - count * g
        plain.append(index(torch.stack([d * d, d * g, d * w], 1)))
        if curvature:
            drawn.append(d)
        tick()

    for part in _portions(sorted(only), max(HELD // problem.layout.size, 1) if curvature else len(only)):
        separated.each(frozenset(part), multiply)
        for d in drawn:  # outside of the pass: a product is a pass of its own
            curved.append(torch.stack([d @ product(d), d @ Hg, d @ Hw])[None, :])
        drawn.clear()
    first = _terms(plain, index((g * g)[:, None])[:, 0], c)
    return first, _terms(curved, (g @ Hg)[None], c) if curvature else None


def _portions(places: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _terms(rows: list[Tensor], q: Tensor, c: Tensor) -> Terms:
    a, b, r = torch.stack(rows).unbind(2)
    return Terms(a, b, r, q, c)


def _blocks(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Sums of the columns over each block: (numbers, k) → (blocks, k)."""
    return lambda x: torch.stack([part.sum(0) for part in problem.blocks.split(x).values()])
