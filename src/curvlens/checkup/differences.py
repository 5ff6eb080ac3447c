"""Compares derivatives on one sample with finite differences: ⟨g, v⟩ with the loss, H v with the gradient.

Along θ + t v the loss has the derivative ⟨g, v⟩ and the gradient g has the derivative H v. From
steps t and t/2, by Richardson,

    D = D_½ + (D_½ − D_1)/3,  D_c = (g(ct) − g(−ct))/2ct,  D − H v = O(t⁴).

A step is judged only if it crosses no visible kink (`Kinks`) and the gradient bends little along it. Otherwise the
difference does not approximate a derivative. H v is wrong if it is wrong at every judged step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlens._evaluation.graph import Graph
from curvlens._evaluation.pieces import Piece
from curvlens.checkup.kinks import Kinks
from curvlens.linalg.vectors import distance, dot, norm
from curvlens.problem import Problem


@dataclass(frozen=True)
class Judgement:
    """Steps and tolerance for one dtype."""

    steps: Sequence[float]
    """Lengths t, relative to the size of the parameters."""
    tolerance: float
    """The largest relative difference that counts as rounding."""


JUDGEMENTS = {
    torch.float64: Judgement((1e-3, 1e-4, 1e-5), 1e-6),
    torch.float32: Judgement((2e-2, 1e-2, 5e-3), 2e-2),
}
"""By dtype. Half precision is missing: it has too few digits for differences."""
_SLOPE = 1e-2
"""The largest relative difference of a slope that counts as right. A crossed kink changes the slope a little."""
_SETTLED = 0.25
"""The largest relative change of a difference quotient, when its step is halved, that counts as convergence."""
_NOISE = 1e3
"""Allowed rounding error in units of eps: of the gradient relative to its norm, of the loss relative to its value."""


def product(problem: Problem, piece: Piece) -> tuple[Tensor, Tensor]:
    """A direction v, and H v of the summed loss of a piece."""
    names = problem.layout.names
    v = direction(problem)
    with problem._evaluation.isolated():
        graph = Graph(problem._evaluation, piece, names)
        parts = graph.second(names, problem.layout.unflatten(v), functional=False, retain=False)
    return v, _flat([parts[name] for name in names])


def direction(problem: Problem) -> Tensor:
    """A random vector. Its root mean square in each parameter is that of the parameter (0.1 where that is zero)."""
    generator = torch.Generator().manual_seed(0)
    skipped = _padding_rows(problem)
    parts = []
    for name, part in problem.layout.unflatten(problem.theta).items():
        size = float(part.detach().double().square().mean().sqrt()) or 0.1
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        if name in skipped:
            noise[skipped[name]] = 0  # torch has no gradient for this row; `check_embeddings` reports it
        parts.append((noise * size).to(part).reshape(-1))
    return torch.cat(parts)


def _padding_rows(problem: Problem) -> dict[str, int]:
    """The ``padding_idx`` of each embedding, by parameter name."""
    tables = [m for m in problem.model.modules() if isinstance(m, nn.Embedding)]
    rows = {id(m.weight): m.padding_idx for m in tables if m.padding_idx is not None}
    return {name: rows[id(p)] for name, p in problem.model.named_parameters() if id(p) in rows}


def slope_error(problem: Problem, piece: Piece, v: Tensor, dtype: torch.dtype) -> float | None:
    """The relative difference of ⟨g, v⟩ and finite differences of the loss. None if no step could be judged."""
    judgement = JUDGEMENTS.get(dtype)
    if judgement is None:
        return None
    found: list[float] = []
    here, _ = _gradient(problem, piece, v, 0.0)
    typical = norm(here * v)  # size of ⟨g, v⟩ for random signs; ⟨g, v⟩ itself may nearly cancel
    slope, (value, sides) = dot(here, v), _loss(problem, piece, v, 0.0)
    del here
    for t in judgement.steps:
        ends = [_loss(problem, piece, v, c * t) for c in (1, -1, 0.5, -0.5)]
        plus, minus, half_plus, half_minus = (loss for loss, _ in ends)
        coarse, fine = (plus - minus) / (2 * t), (half_plus - half_minus) / t
        derivative = fine + (fine - coarse) / 3
        difference, scale = abs(slope - derivative), max(abs(slope), abs(derivative), typical)
        if difference <= _SLOPE * scale + _NOISE * torch.finfo(dtype).eps * abs(value) / t:
            return 0.0
        settled = abs(fine - coarse) < min(difference / 4, _SETTLED * abs(fine))
        if all(kinks.same_as(sides) for _, kinks in ends) and settled:
            found.append(difference / scale)
    return min(found) if len(found) > 1 else None


def _loss(problem: Problem, piece: Piece, v: Tensor, t: float) -> tuple[float, Kinks]:
    """The summed loss at θ + t v, and on which side of each kink the pass was."""
    moved, kinks = problem.with_params(problem.theta + t * v)._evaluation, Kinks()

    def action() -> float:
        total, _ = moved.sum_and_count(moved.loss_function.outputs(moved.model, piece.batch), piece)
        return float(total)

    with torch.no_grad(), kinks:
        return moved.at(None, action), kinks


def error(problem: Problem, piece: Piece, v: Tensor, hv: Tensor, dtype: torch.dtype) -> float | None:
    """The difference of H v and finite differences of gradients, relative to the larger of both.

    It is 0.0 if one step agrees, else the smallest difference of all judged steps, and None if no step could be judged.
    ``dtype`` is the dtype of the passes.
    """
    judgement = JUDGEMENTS.get(dtype)
    if judgement is None:
        return None
    found: list[float] = []
    here, sides = _gradient(problem, piece, v, 0.0)
    for t in judgement.steps:
        derivative, bend = _derivative(problem, piece, v, t, here, sides, dtype)
        if derivative is None:
            continue
        scale = max(norm(hv), norm(derivative))
        difference = norm(derivative.sub_(hv))
        noise = _NOISE * torch.finfo(dtype).eps * norm(here) / t
        if difference <= judgement.tolerance * scale + noise:
            return 0.0
        if bend < difference / 2:
            found.append(difference / scale)
    return min(found, default=None)


def _derivative(
    problem: Problem, piece: Piece, v: Tensor, t: float, here: Tensor, sides: Kinks, dtype: torch.dtype
) -> tuple[Tensor | None, float]:
    """D of a step t, and how much the gradient bends along it; None if the step crosses a kink, or is too long.

    D_1 and D_½ of a step that is longer than the features of the function differ, as do those of noise.

    In place, and in the dtype of the gradients: beside H v and the gradient here, three vectors are held.
    """
    slopes, bend = list[Tensor](), 0.0
    for part in (1.0, 0.5):
        plus, kinks = _gradient(problem, piece, v, part * t)
        minus, others = _gradient(problem, piece, v, -part * t)
        if not (kinks.same_as(sides) and others.same_as(sides)):
            return None, 0.0
        slope = plus.sub(minus).div_(2 * part * t)
        if part == 1.0:
            bend = norm(plus.add_(minus).sub_(here, alpha=2)) / t
        slopes.append(slope)
        del plus, minus
    coarse, fine = slopes
    if distance(fine, 1.0, coarse) > _SETTLED * norm(fine) + _NOISE * torch.finfo(dtype).eps * norm(here) / t:
        return None, 0.0
    return fine.mul_(4 / 3).sub_(coarse, alpha=1 / 3), bend


def _gradient(problem: Problem, piece: Piece, v: Tensor, t: float) -> tuple[Tensor, Kinks]:
    """The gradient of the summed loss at θ + t v, with fused kernels, and on which side of each kink the pass was."""
    moved = problem.with_params(problem.theta + t * v)._evaluation
    leaves, kinks = moved.leaves(moved.layout.names), Kinks()

    def action() -> Sequence[Tensor]:
        outputs = moved.loss_function.outputs(moved.model, piece.batch)
        total, _ = moved.sum_and_count(outputs, piece)
        return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    with torch.enable_grad(), kinks:
        parts = moved.at(leaves, action)
    return _flat(parts), kinks


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])
