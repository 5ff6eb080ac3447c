"""InfoNCE: a loss that couples the samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.calculus import losses as closed_form
from curvlens.errors import CurvlensError
from curvlens.losses.base import Loss, describe, main_output


class Contrastive(Loss):
    """InfoNCE inside a batch: the correct class of row i of the similarity logits is column i.

    The outputs are the (n, n) similarities that the model returns (a tensor, or ``logits_per_image`` of a CLIP).
    ``symmetric`` takes the mean of both directions. The loss of a sample depends on its batch, so batches are never
    split. Several batches need ``per_batch=True``: the mean over the batches as given.
    """

    convex = True
    couples_batch = True

    def __init__(self, *, symmetric: bool = False, per_batch: bool = False) -> None:
        self.symmetric = symmetric
        self.per_batch = per_batch
        self.row_wise = not symmetric

    def __repr__(self) -> str:
        return f"Contrastive(symmetric={self.symmetric}, per_batch={self.per_batch})"

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The similarity logits."""
        result = batches.call(model, batch)
        found = getattr(result, "logits_per_image", None)
        return self._square(found if isinstance(found, Tensor) else main_output(result))

    @staticmethod
    def _square(outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != outputs.shape[1]:
            raise CurvlensError(f"Contrastive expects similarity logits of shape (n, n), got {describe(outputs)}.")
        return outputs

    def sum_and_count(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Σ_i −log softmax(z_i)_i, or the mean of this and the same for the columns; n."""
        own = torch.arange(len(outputs), device=outputs.device)
        total = F.cross_entropy(outputs, own, reduction="none").double().sum()
        if self.symmetric:
            total = (total + F.cross_entropy(outputs.T, own, reduction="none").double().sum()) / 2
        return total, len(outputs)

    def curvature(self, outputs: Tensor, batch: Batch, t: Tensor) -> Tensor:
        """(diag p − p pᵀ) t of every row; with ``symmetric`` half of it, and half of the same for the columns."""
        one = outputs.new_ones(len(outputs))
        by_rows = closed_form.cross_entropy_curvature(outputs, one, t)
        if not self.symmetric:
            return by_rows
        return (by_rows + closed_form.cross_entropy_curvature(outputs.T.contiguous(), one, t.T.contiguous()).T) / 2

    def sqrt_curvature(self, outputs: Tensor, batch: Batch, z: Tensor) -> Tensor:
        """(diag √p − p √pᵀ) z of every row (one direction only: two need twice as many numbers)."""
        if self.symmetric:
            return super().sqrt_curvature(outputs, batch, z)  # type: ignore[no-any-return]
        return closed_form.cross_entropy_sqrt_curvature(outputs, outputs.new_ones(len(outputs)), z)

    @property
    def has_sqrt_curvature(self) -> bool:
        """Whether there is a square root: only for one direction."""
        return super().has_sqrt_curvature and not self.symmetric

    def sample(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """p − e_j with the partner j drawn from p (one direction only)."""
        if self.symmetric:
            raise CurvlensError(
                "A symmetric contrastive loss is not a log-likelihood, so its Fisher matrix cannot be sampled. Use ggn."
            )
        uniform = torch.rand(len(outputs), generator=generator, dtype=torch.float64).to(outputs.device)
        return closed_form.cross_entropy_sample(outputs, outputs.new_ones(len(outputs)), uniform)
