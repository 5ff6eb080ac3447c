"""The square loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.calculus import losses as closed_form
from curvlens.errors import CurvlensError
from curvlens.losses.base import Loss, Outputs, describe, main_output


class MSE(Loss):
    """``F.mse_loss``: the square error, averaged over all entries of the outputs."""

    convex = True

    def __repr__(self) -> str:
        return "MSE()"

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the model returns; the first entry of a tuple, the logits of a Hugging Face output."""
        return main_output(batches.call(model, batches.split_target(batch)[0]))

    def sum_and_count(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """‖f − y‖² and the number of entries."""
        target = batches.split_target(batch)[1]
        if not isinstance(outputs, Tensor) or not isinstance(target, Tensor) or outputs.shape != target.shape:
            if isinstance(outputs, Tensor) and isinstance(target, Tensor) and outputs.numel() == target.numel():
                raise CurvlensError(
                    f"MSE expects outputs and target of one shape, got {tuple(outputs.shape)} and "
                    f"{tuple(target.shape)}. Reshape the target: target.reshape({tuple(outputs.shape)})."
                )
            raise CurvlensError(
                f"MSE expects outputs and target of one shape, got {describe(outputs)} and {describe(target)}. Give a "
                "tuple (inputs, target). As data=, a tuple is one batch and a list is many batches."
            )
        return (outputs - target.to(outputs.dtype)).square().double().sum(), outputs.numel()

    def curvature(self, outputs: Tensor, batch: Batch, t: Tensor) -> Tensor:
        """2 t."""
        return closed_form.square_curvature(t)

    def sqrt_curvature(self, outputs: Tensor, batch: Batch, z: Tensor) -> Tensor:
        """√2 z."""
        return z * 2**0.5

    def sample(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """2 (f − y) with y drawn from N(f, ½): the distribution whose −log p is the square error."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
        return noise.to(outputs) * 2**0.5
