"""The numbers of a sweep over sizes, from dense matrices by autodiff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl
import truth


def dense(problem: cl.Problem) -> truth.Truth:
    """The same loss, written plainly."""

    def rows(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
        return logits[labels != -100], labels[labels != -100]

    return truth.Truth(problem.model, list(problem.data), rows, square=False)


def expected(problem: cl.Problem, top: int) -> dict[str, float]:
    """All numbers of curvature from dense matrices by autodiff."""
    known = dense(problem)
    H, G = torch.linalg.eigvalsh(known.hessian), torch.linalg.eigvalsh(known.ggn).flip(0)
    tr, norm = float(H.sum()), float(H.norm())
    return {
        "parameters": len(H),
        "train_loss": float(known.loss(known.theta)),
        "gradient_norm": float(known.gradient(known.theta).norm()),
        "lambda_max": float(H[-1]),
        "lambda_min": float(H[0]),
        "trace": tr,
        "frobenius": norm,
        "effective_rank": tr**2 / norm**2,
        "condition": float(G[0] / G[top - 1]),
        "kept": top,
        "negative_mass": float((-1e-10 * H.abs().max() > H).double().mean()),
    }


def agree(found: Mapping[str, Mapping[str, float]], known: Mapping[str, float], rel: float) -> None:
    """Equal up to rounding, or within four errors."""
    for name, value in known.items():
        error = found["errors"].get(name, 0.0)
        assert abs(found["values"][name] - value) <= rel * max(abs(value), 0.01) + 4 * error, name
