"""Losses: a sum over tokens and one division by their number.

The protocol (only the first two are required; `Loss` has defaults for the others):

- ``outputs(model, batch)``: the outputs f(θ), a tensor or a tree of tensors, at which H is split into G and F;
- ``sum_and_count(outputs, batch) → (sum, count)``: the sum of the token losses, and the number to divide by;
- ``curvature(outputs, batch, t)``: the Hessian of the sum with respect to the outputs, applied to ``t``;
- ``sqrt_curvature(outputs, batch, z)``: a square root of it; ``sample(outputs, batch, generator)``: gradients at
  the outputs for labels drawn from the model, whose covariance it is; ``convex``: whether it is positive semidefinite.

A plain callable ``(outputs, batch) → (sum, count)`` is a loss too, and so is ``(model, batch) → number``.
"""

from curvlens.losses.base import Loss
from curvlens.losses.contrastive import Contrastive
from curvlens.losses.cross_entropy import CrossEntropy
from curvlens.losses.language import CausalLM, MaskedLM
from curvlens.losses.mse import MSE
from curvlens.losses.user import FromModel, FromOutputs, as_loss

__all__ = ["MSE", "CausalLM", "Contrastive", "CrossEntropy", "FromModel", "FromOutputs", "Loss", "MaskedLM", "as_loss"]
