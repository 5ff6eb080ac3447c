"""Are derivatives right? On one sample, by differences: ⟨g, v⟩ of the loss, H v of gradients.

Along θ + t v the loss has the derivative ⟨g, v⟩ and the gradient g has the derivative H v. From
steps t and t/2, by Richardson,

    D = D_½ + (D_½ − D_1)/3,  D_c = (g(ct) − g(−ct))/2ct,  D − H v = O(t⁴).

A step is judged only if it crosses no kink that can be seen (`Kinks`) and if the gradient bends little along it, so
that a difference means a derivative; H v is wrong if it is wrong at every step that could be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlens.checkup.kinks import Kinks
from curvlens.operators.graph import Graph
from curvlens.pieces import Piece
from curvlens.problem import Problem


@dataclass(frozen=True)
class Judgement:
    """What is asked of a dtype."""

    steps: Sequence[float]
    """Lengths t, in units of the parameters' own size."""
    tolerance: float
    """Relative difference that is still right."""


JUDGEMENTS = {
    torch.float64: Judgement((1e-3, 1e-4, 1e-5), 1e-6),
    torch.float32: Judgement((2e-2, 1e-2, 5e-3), 2e-2),
}
"""Half precision has too few digits for differences."""
_SLOPE = 1e-2
"""Relative difference of a slope that is still right: kinks, if they are hit, change it a little."""
_NOISE = 1e3
"""Rounding units by which a gradient may be off, relative to its norm; and the loss, relative to itself."""


def product(problem: Problem, piece: Piece) -> tuple[Tensor, Tensor]:
    """A direction v, and H v of the summed loss of a piece."""
    names = problem.layout.names
    v = direction(problem)
    with problem.isolated():
        graph = Graph(problem, piece, names)
        parts = graph.second(names, problem.layout.unflatten(v), functional=False, retain=False)
    return v, _flat(problem, [parts[name] for name in names])


def direction(problem: Problem) -> Tensor:
    """A random vector, in every parameter as large as the parameter itself (0.1 where that is zero)."""
    generator = torch.Generator().manual_seed(0)
    skipped = _padding_rows(problem)
    parts = []
    for name, part in problem.layout.unflatten(problem.theta).items():
        size = float(part.detach().double().square().mean().sqrt()) or 0.1
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        if name in skipped:
            noise[skipped[name]] = 0  # torch leaves the row out of the backward pass; `check_embeddings` says so
        parts.append((noise * size).to(part).reshape(-1))
    return torch.cat(parts)


def _padding_rows(problem: Problem) -> dict[str, int]:
    """The rows of embeddings, by parameter, that are their ``padding_idx``."""
    tables = [m for m in problem.model.modules() if isinstance(m, nn.Embedding)]
    rows = {id(m.weight): m.padding_idx for m in tables if m.padding_idx is not None}
    return {name: rows[id(p)] for name, p in problem.model.named_parameters() if id(p) in rows}


def slope_error(problem: Problem, piece: Piece, v: Tensor, dtype: torch.dtype) -> float | None:
    """How far ⟨g, v⟩ is from differences of the loss, relative to its size; None if nothing can be said."""
    judgement = JUDGEMENTS.get(dtype)
    if judgement is None:
        return None
    found: list[float] = []
    here, _ = _gradient(problem, piece, v, 0.0)
    typical = float((here * v).norm())  # of ⟨g, v⟩ for signs at random: the sum itself may nearly vanish
    slope, (value, sides) = float(here @ v.double()), _loss(problem, piece, v, 0.0)
    for t in judgement.steps:
        ends = [_loss(problem, piece, v, c * t) for c in (1, -1, 0.5, -0.5)]
        plus, minus, half_plus, half_minus = (loss for loss, _ in ends)
        coarse, fine = (plus - minus) / (2 * t), (half_plus - half_minus) / t
        derivative = fine + (fine - coarse) / 3
        difference, scale = abs(slope - derivative), max(abs(slope), abs(derivative), typical)
        if difference <= _SLOPE * scale + _NOISE * torch.finfo(dtype).eps * abs(value) / t:
            return 0.0
        if all(kinks.same_as(sides) for _, kinks in ends) and abs(fine - coarse) < difference / 4:
            found.append(difference / scale)
    return min(found) if len(found) > 1 else None


def _loss(problem: Problem, piece: Piece, v: Tensor, t: float) -> tuple[float, Kinks]:
    """The summed loss at θ + t v, and the sides of its kinks."""
    moved, kinks = problem.with_params(problem.theta + t * v), Kinks()

    def action() -> float:
        total, _ = moved.sum_and_count(moved.loss_function.outputs(moved.model, piece.batch), piece)
        return float(total)

    with torch.no_grad(), kinks:
        return moved.at(None, action), kinks


def error(problem: Problem, piece: Piece, v: Tensor, hv: Tensor, dtype: torch.dtype) -> float | None:
    """How far H v is from differences of gradients, relative to the larger of both; None if nothing can be said.

    0.0 as soon as one step agrees; otherwise the smallest difference among the steps that could be judged. ``dtype``
    is that in which passes are done.
    """
    judgement = JUDGEMENTS.get(dtype)
    if judgement is None:
        return None
    found: list[float] = []
    here, sides = _gradient(problem, piece, v, 0.0)
    for t in judgement.steps:
        ends = [_gradient(problem, piece, v, c * t) for c in (1, -1, 0.5, -0.5)]
        if not all(kinks.same_as(sides) for _, kinks in ends):
            continue
        plus, minus, half_plus, half_minus = (g for g, _ in ends)
        coarse, fine = (plus - minus) / (2 * t), (half_plus - half_minus) / t
        derivative = fine + (fine - coarse) / 3
        difference, scale = float((hv - derivative).norm()), float(torch.maximum(hv.norm(), derivative.norm()))
        noise = _NOISE * torch.finfo(dtype).eps * float(here.norm()) / t
        if difference <= judgement.tolerance * scale + noise:
            return 0.0
        bend = float((plus - 2 * here + minus).norm()) / t
        if bend < difference / 2:
            found.append(difference / scale)
    return min(found, default=None)


def _gradient(problem: Problem, piece: Piece, v: Tensor, t: float) -> tuple[Tensor, Kinks]:
    """The gradient of the summed loss at θ + t v, with fused kernels as they are, and the sides of its kinks."""
    moved = problem.with_params(problem.theta + t * v)
    leaves, kinks = moved.leaves(moved.layout.names), Kinks()

    def action() -> Sequence[Tensor]:
        outputs = moved.loss_function.outputs(moved.model, piece.batch)
        total, _ = moved.sum_and_count(outputs, piece)
        return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    with torch.enable_grad(), kinks:
        parts = moved.at(leaves, action)
    return _flat(problem, parts), kinks


def _flat(problem: Problem, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1).double() for part in parts])
