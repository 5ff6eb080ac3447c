"""How noisy is the gradient of one sample?

Sample i of n has the summed loss S_i and c_i tokens, C = Σ c_i. The gradient g = Σ ∇S_i / C is a ratio of sums,
so that sample i stands for g_i = g + e_i, e_i = (n/C) d_i, d_i = ∇S_i − c_i g: their mean is g, and Σ is their
covariance (`docs/explanation/math.md`, "Noise").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

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
NO_GRADIENT = "the gradient cannot be told from 0: its square is not above its noise"
NO_CURVATURE = "gᵀHg is not above its noise: the curvature along the gradient cannot be told from 0, or is negative"
HELD = 1 << 24
"""Numbers of the gradients that wait for their products: 128 MiB."""


Three = tuple[Estimate, Estimate, Estimate]


@as_found
def noise(
    problem: Problem,
    *,
    samples: int | None = None,
    curvature: bool | Literal["block"] = False,
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
        curvature: also tr(HΣ) and tr(HΣ)/gᵀHg, with the Hessian of the whole problem: a product for each sample. With
            ``"block"`` also in each diagonal block b of H, tr(H_bb Σ_bb) and g_bᵀ H_bb g_b: what a step of that block
            alone meets. They do not sum to those of the whole. This takes a product for each sample and block.
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
    if curvature not in (True, False, "block"):
        raise CurvlensError(f"curvature={curvature!r}, expected True, False or 'block'.")
    for name, value in (("samples", samples), ("micro_batch", micro_batch)):
        if value is not None and not (whole(value) and value >= 1):
            raise CurvlensError(f"{name}={value!r}, expected a whole number, 1 or more.")
    separated = Separated(problem, micro_batch)
    count, asked = separated.count, min(samples or separated.count, separated.count)
    products = (1 + (len(problem.blocks) if curvature == "block" else 0)) if curvature else 0
    allowed = separated.allowed(parse_budget(budget), products)
    n = min(asked, allowed)
    if n < FEWEST:
        why = f"budget={budget!r} allows {n}" if allowed < asked else f"there are {n}"
        raise CurvlensError(
            f"A covariance and its error need {FEWEST} {separated.name} gradients at least; {why}. Give more samples, "
            "or a larger budget."
        )
    draw = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:n].tolist()
    plain, curved, within = _measured(separated, frozenset(draw), curvature, progress)
    about = {name: value for name, value in provenance(problem, seed=seed).items() if name != "operator"}
    about["samples"] = "samples" if separated.name == "sample" else "batches"

    def estimates(terms: Terms, *, curved: bool = False) -> Three:
        unknown = NO_CURVATURE if curved else NO_GRADIENT
        return terms.estimates(separated.size, n, about, unknown, definite=not curved)

    def by_block(terms: Terms, *names: str, curved: bool = False) -> list[ByBlock]:
        found = {name: estimates(terms.of(i), curved=curved) for i, name in enumerate(problem.blocks)}
        return [ByBlock({name: three[i] for name, three in found.items()}, what) for i, what in enumerate(names)]

    trace, square, scale = estimates(plain.whole())
    traces, squares, scales = by_block(plain, "tr Σ of the gradient of one sample", "‖g‖²", "noise scale tr Σ/‖g‖²")
    bent = (None, None, None) if curved is None else estimates(curved, curved=True)
    blocks: list[ByBlock] | tuple[None, None, None] = (None, None, None)
    if within is not None:
        blocks = by_block(within, "tr(HΣ)", "gᵀHg", "noise scale tr(HΣ)/gᵀHg", curved=True)
    reduced = n < asked
    return Noise(
        trace=trace,
        gradient=square,
        scale=scale,
        traces=traces,
        scales=scales,
        samples=n,
        each=separated.name,
        size=separated.size,
        status=Status.STOPPED_AT_BUDGET if reduced else Status.SAMPLED,
        curvature_trace=bent[0],
        curvature_gradient=bent[1],
        curvature_scale=bent[2],
        gradients=squares,
        curvature_traces=blocks[0],
        curvature_gradients=blocks[1],
        curvature_scales=blocks[2],
        products=products * (n + 2),
        note=f"budget={budget!r} allowed {n} of {asked} {separated.name} gradients" if reduced else "",
        provenance=about,
    )


def _measured(
    separated: Separated, only: frozenset[int], curvature: bool | str, progress: Progress | None
) -> tuple[Terms, Terms | None, Terms | None]:
    """Two passes over the drawn samples: their sums, then their products with g and with each other.

    The plain terms by block, and with curvature those with H as a whole and with its diagonal blocks.
    """
    problem = separated.problem
    total = (3 if curvature else 2) * len(only)
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
    metric = Metric(problem, g, w, blocks=curvature == "block") if curvature else None
    plain, drawn = list[Tensor](), list[Tensor]()
    index = _blocks(problem)

    def multiply(gradient: Tensor, count: float) -> None:
        d = gradient - count * g
        plain.append(index(torch.stack([d * d, d * g, d * w], 1)))
        if metric is not None:
            drawn.append(d)
        tick()

    for part in _portions(sorted(only), max(HELD // problem.layout.size, 1) if curvature else len(only)):
        separated.each(frozenset(part), multiply)
        for d in drawn:  # outside of the pass: a product is a pass of its own
            if metric is not None:
                metric.add(d)
            tick()
        drawn.clear()
    first = _terms(plain, index((g * g)[:, None])[:, 0], c)
    return (first, None, None) if metric is None else (first, *metric.terms(c))


class Metric:
    """Inner products with H, and with its diagonal blocks, of each d with itself, with g and with w."""

    def __init__(self, problem: Problem, g: Tensor, w: Tensor, *, blocks: bool) -> None:
        self.dtype = problem.dtype
        self.split = problem.blocks.split
        self.whole = hessian(problem)
        self.blocks = self.whole.blocks() if blocks else {}
        self.seen = [{"": g, **self._own(g)}, {"": w, **self._own(w)}]
        self.bent = [{name: self._times(name, x) for name, x in each.items()} for each in self.seen]
        self.rows = list[dict[str, Tensor]]()

    def _own(self, v: Tensor) -> dict[str, Tensor]:
        return dict(self.split(v)) if self.blocks else {}

    def _times(self, name: str, v: Tensor) -> Tensor:
        H = self.blocks[name] if name else self.whole
        applied: Tensor = H @ v.to(self.dtype)
        return applied.double()

    def add(self, d: Tensor) -> None:
        """One more sample."""
        Hg, Hw = self.bent
        own = {"": d, **self._own(d)}
        self.rows.append(
            {name: torch.stack([x @ self._times(name, x), x @ Hg[name], x @ Hw[name]]) for name, x in own.items()}
        )

    def terms(self, c: Tensor) -> tuple[Terms, Terms | None]:
        """With H as a whole, and with its blocks."""
        squares = {name: x @ self.bent[0][name] for name, x in self.seen[0].items()}

        def of(names: list[str]) -> Terms:
            rows = [torch.stack([row[name] for name in names]) for row in self.rows]
            return _terms(rows, torch.stack([squares[name] for name in names]), c)

        return of([""]), of(list(self.blocks)) if self.blocks else None


def _portions(places: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _terms(rows: list[Tensor], q: Tensor, c: Tensor) -> Terms:
    a, b, r = torch.stack(rows).unbind(2)
    return Terms(a, b, r, q, c)


def _blocks(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Sums of the columns over each block: (numbers, k) → (blocks, k)."""
    return lambda x: torch.stack([part.sum(0) for part in problem.blocks.split(x).values()])
