"""The protocol of a loss, with defaults for all that can be derived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.errors import CurvlensError, a_kind

Outputs = Any
"""A tensor, or a tree of tensors."""


class Loss:
    """A loss of a model's outputs. Subclasses define at least `sum_and_count`."""

    convex: bool = False
    """Whether the sum is a convex function of the outputs, so that the Gauss–Newton matrix is positive semidefinite."""
    couples_batch: bool = False
    """Whether the loss of a sample depends on the other samples of its batch."""
    row_wise: bool = True
    """Whether the loss of a row (`row_dim`) of the outputs depends on this row alone."""
    row_dim: int = -1
    """The axis of a row in the outputs: that of the classes."""

    def for_model(self, model: nn.Module) -> Loss:
        """The loss for this model. The default returns the loss itself."""
        return self

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the model returns, including all entries of a tuple; for a Hugging Face output, its logits."""
        return as_returned(batches.call(model, batches.split_target(batch)[0]))

    def convex_on(self, data: Iterable[Batch]) -> bool:
        """Whether it is convex in the outputs with the labels of this data."""
        return self.convex

    def sum_and_count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Any]:
        """The sum of the losses of all valid tokens, and their number (or weight)."""
        raise CurvlensError(
            f"{type(self).__name__} lacks sum_and_count(outputs, batch). Define it; a loss needs no other method."
        )

    def curvature(self, outputs: Outputs, batch: Batch, t: Outputs) -> Outputs:
        """Apply the Hessian of the sum with respect to the outputs; here by automatic differentiation."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in batches.tensors(outputs)]
            total, _ = self.sum_and_count(batches.replace_tensors(outputs, leaves), batch)
            floating = [x for x in leaves if x.requires_grad]
            gradient = torch.autograd.grad(total, floating, create_graph=True, allow_unused=True)
            pairs = [
                (g, v)
                for g, v in zip(gradient, (v for v in batches.tensors(t) if v.is_floating_point()), strict=True)
                if g is not None and g.requires_grad
            ]
            if not pairs:
                return batches.map_tensors(torch.zeros_like, t)
            product = torch.autograd.grad(
                [g for g, _ in pairs], floating, [v for _, v in pairs], materialize_grads=True, allow_unused=True
            )
        done = iter(product)
        return batches.replace_tensors(
            outputs, (next(done).detach() if x.requires_grad else torch.zeros_like(x) for x in leaves)
        )

    def sqrt_curvature(self, outputs: Outputs, batch: Batch, z: Outputs) -> Outputs:
        """Apply a square root Λ^½ of the output Hessian, Λ^½ (Λ^½)ᵀ = Λ."""
        raise CurvlensError(
            f"{type(self).__name__} has no square root of its output Hessian. Define sqrt_curvature(outputs, batch, z)."
        )

    @property
    def has_sqrt_curvature(self) -> bool:
        """Whether the loss defines `sqrt_curvature`."""
        return getattr(self.sqrt_curvature, "__func__", None) is not Loss.sqrt_curvature

    def sample(self, outputs: Outputs, batch: Batch, generator: torch.Generator) -> Outputs:
        """Gradients at the outputs, for labels drawn from the model's own distribution."""
        raise CurvlensError(
            f"{type(self).__name__} does not say which distribution its labels have, so the Fisher matrix cannot be "
            "sampled. Define sample(outputs, batch, generator), or use ggn or empirical_fisher."
        )


def as_returned(result: Any) -> Any:
    """The logits of a Hugging Face output; any other result unchanged."""
    for holder in ("logits", "prediction_logits", "last_hidden_state"):
        found = result.get(holder) if isinstance(result, Mapping) else getattr(result, holder, None)
        if isinstance(found, Tensor):
            return found
    return result


def main_output(result: Any) -> Any:
    """The logits of a Hugging Face output, the first entry of a tuple, or the result itself."""
    found = as_returned(result)
    return found[0] if isinstance(found, (tuple, list)) and found else found


def describe(value: Any) -> str:
    """A description of a value for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{a_kind(value)} of {len(value)}"
    return "None" if value is None else a_kind(value)
