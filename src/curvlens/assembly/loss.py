"""The loss at the end of a network: its gradient, and its curvature Λ as products and as a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus.curvature import Root
from curvlens.calculus.output_loss import Outputs, output_loss
from curvlens.calculus.softmax import jacobian_rows
from curvlens.calculus.vec import identity
from curvlens.errors import CurvlensError, a_kind

IGNORED = -100
"""The label of tokens that do not count."""


@dataclass(frozen=True)
class End:
    """The gradient (B, T, c) of a loss at the outputs, and its curvature: a number, or a matrix for each token.

    For cross-entropy the matrices are s (diag p − p pᵀ), stored as p and s. Products never build them.
    """

    gradient: Tensor
    curvature: float | Tensor
    share: Tensor | None = None
    """s, (B, T), if ``curvature`` is p."""

    def apply(self, t: Tensor) -> Tensor:
        """Λ t for t of shape (B, T, c, k)."""
        if isinstance(self.curvature, float):
            return self.curvature * t
        if self.share is None:
            return self.curvature @ t
        part = self.curvature[..., None] * t
        part = part - self.curvature[..., None] * part.sum(-2, keepdim=True)
        return self.share[..., None, None] * part

    def dense(self) -> Tensor:
        """Λ of every token, (B, T, c, c). Between two tokens it is zero."""
        samples, length, width = self.gradient.shape
        if isinstance(self.curvature, float):
            return (self.curvature * identity(width, self.gradient)).expand(samples, length, -1, -1)
        if self.share is None:
            return self.curvature
        return self.share[..., None, None] * jacobian_rows(self.curvature)


def end(outputs: Tensor, batch: tuple[int, ...], target: Any, labels: Any, grad: Any, curvature: Any) -> End:
    """The requested loss at outputs (B, T, c); ``batch`` are the original sample axes."""
    if sum(given is not None for given in (target, labels, grad)) != 1:
        given = [n for n, v in (("target", target), ("labels", labels), ("grad", grad)) if v is not None]
        raise CurvlensError(
            f"Got {' and '.join(given) or 'no loss'}: give one of target= (square loss), labels= (cross-entropy), or "
            "grad= with curvature= (any other)."
        )
    if labels is not None:
        return _cross_entropy(outputs, batch, labels)
    samples, length, width = outputs.shape
    of = Outputs(lambda: outputs, (samples, length, width), batch, outputs)
    loss = output_loss(of, target, grad, curvature, "mean")
    if not (isinstance(loss.rest, (int, float)) and loss.rest == 0):
        raise CurvlensError("curvature is a pair, expected one: here all of it belongs to the Gauss–Newton part.")
    outer = loss.outer.R @ loss.outer.R.mT if isinstance(loss.outer, Root) else loss.outer
    return End(loss.gradient, outer if isinstance(outer, Tensor) else float(outer))


def _cross_entropy(outputs: Tensor, batch: tuple[int, ...], labels: Any) -> End:
    shape, classes = (*batch, outputs.shape[1]), outputs.shape[2]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        given = labels.dtype if isinstance(labels, Tensor) else a_kind(labels)
        raise CurvlensError(f"labels is {given}, expected a tensor of integers, one class a token: labels.long().")
    if tuple(labels.shape) != shape:
        raise CurvlensError(f"labels has shape {tuple(labels.shape)}, expected {shape}, a label for each token.")
    labels = labels.reshape(outputs.shape[:2])
    counted = labels != IGNORED
    wrong = labels[counted & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise CurvlensError(f"There is a label {int(wrong[0])}, expected 0 to {classes - 1}, or {IGNORED} for none.")
    if not counted.any():
        raise CurvlensError(f"Every label is {IGNORED}: no token counts, and there is no mean.")
    p = outputs.softmax(-1)
    share = counted.to(p.dtype) / counted.sum()
    hit = torch.zeros_like(p).scatter_(-1, labels.where(counted, 0)[..., None], 1.0)
    return End(share[..., None] * (p - hit), p, share)
