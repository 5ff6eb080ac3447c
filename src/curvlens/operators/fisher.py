"""Fisher matrices: Gauss–Newton matrices with outer products of output gradients in the middle.

A *row* of the outputs is the logits of one token (the last axis, or ``class_dim``). With the gradient e_i of the loss
of token i with respect to its row, both matrices are (1/n) Σ_i J_iᵀ e_i e_iᵀ J_i. They differ in the label of token i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens._evaluation.graph import Graph, LossBoundary
from curvlens.errors import CurvlensError
from curvlens.operators.curvature import Curvature, gauss_newton, require_problem
from curvlens.operators.draws import drawn
from curvlens.problem import Problem


def fisher(problem: Problem, *, samples: int = 1, seed: int = 0) -> Curvature:
    """The Fisher matrix with ``samples`` labels drawn from the model for every token: an unbiased estimate of G.

    The labels of a sample depend only on the seed and on its place in the data. So every product uses the same labels,
    however the data is batched. A kept graph stores ``samples`` tensors of the outputs' size for them.
    """
    if samples < 1:
        raise CurvlensError(f"samples={samples}, expected 1 or more.")

    def middle(graph: Graph, t: Sequence[Tensor]) -> Sequence[Tensor]:
        assert graph.boundary is not None
        _one_tensor(t)
        key = ("fisher", samples, seed)
        if key not in graph.memo:
            graph.memo[key] = [_labels(graph.boundary, seed * samples + draw) for draw in range(samples)]
        total = [torch.zeros_like(x) for x in t]
        for gradients in graph.memo[key]:
            for out, x, e in zip(total, t, gradients, strict=True):
                out += _outer(e, x, graph.boundary.loss.row_dim) / samples
        return total

    _require_rows(problem, "fisher")
    return gauss_newton(problem, middle, name="Fisher", psd=True)


def empirical_fisher(problem: Problem) -> Curvature:
    """The mean over tokens of the outer product of their gradients, with the labels of the data.

    This is the second moment of the gradients, not a curvature: it tends to G only where the model is well specified
    and trained.
    """

    def middle(graph: Graph, t: Sequence[Tensor]) -> Sequence[Tensor]:
        assert graph.boundary is not None
        _one_tensor(t)
        row = graph.boundary.loss.row_dim
        return [_outer(e, x, row) for e, x in zip(graph.boundary.gradient, t, strict=True)]

    _require_rows(problem, "empirical_fisher")
    return gauss_newton(problem, middle, name="Empirical Fisher", psd=True)


def _outer(e: Tensor, x: Tensor, row: int) -> Tensor:
    """e ⟨e, x⟩ in every row. Outputs with one axis have rows of one number."""
    return e * (e * x).sum(row, keepdim=True) if e.ndim > 1 else e * e * x


def _one_tensor(t: Sequence[Tensor]) -> None:
    if len(t) != 1:
        raise CurvlensError(
            f"The outputs are {len(t)} tensors; a Fisher matrix needs the outputs of a token in one row of one tensor. "
            "Use ggn."
        )


def _require_rows(problem: Problem, name: str) -> None:
    require_problem(problem, name)
    if not problem.loss_function.row_wise:
        raise CurvlensError(
            f"{name} is a mean over the rows of the outputs, and {problem.loss_function!r} couples them. Use ggn."
        )


@torch.no_grad()
def _labels(boundary: LossBoundary, seed: int) -> list[Tensor]:
    """Gradients at the outputs for labels drawn from the model."""
    return drawn(boundary, seed, boundary.loss.sample)
