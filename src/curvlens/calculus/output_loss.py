"""The loss of a layer's output, as the Hessian of the layer needs it: gradient and curvature at every output token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlens.calculus.curvature import OutputCurvature, Root, copied, counts
from curvlens.calculus.magnitude import largest
from curvlens.calculus.tensor_checks import of_one_kind, require_finite
from curvlens.errors import CurvlensError, a_kind


class OutputLoss(NamedTuple):
    """Gradient and curvature of the loss at every output token, scaled by the reduction."""

    gradient: Tensor
    """g, (B, L, d_out)."""
    outer: OutputCurvature
    """S of the Gauss–Newton part, (B, L, d_out, d_out) or a number."""
    rest: OutputCurvature
    """The rest of S: the curvature of later layers, which belongs to the functional part."""

    def copy(self) -> OutputLoss:
        """A copy with tensors of its own."""
        return OutputLoss(self.gradient.clone(), copied(self.outer), copied(self.rest))


class Outputs(NamedTuple):
    """The output of a layer: a function that computes it, its shape (B, L, d_out), and the samples' original shape."""

    compute: Callable[[], Tensor]
    shape: tuple[int, int, int]
    batch: Sequence[int]
    like: Tensor
    """A tensor of the layer. The loss must have its dtype and device."""
    heads: int = 1
    """The number of attention heads, whose outputs add up."""


def output_loss(of: Outputs, target: Any, grad: Any, curvature: Any, reduction: str) -> OutputLoss:
    """The square loss for a target, or any loss given by its gradient and curvature at the output."""
    samples, length, width = of.shape
    shape = (*of.batch, length, width)
    scale = {"mean": 1 / samples, "sum": 1.0}.get(reduction)
    if scale is None:
        raise CurvlensError(f"reduction={reduction!r}, expected 'mean' (over the samples) or 'sum'.")
    if (target is None) == (grad is None):
        given = "both target and grad" if target is not None else "neither target nor grad"
        raise CurvlensError(f"Got {given}: give target= for the square loss, or grad= and curvature= of another.")
    if target is not None:
        if curvature is not None:
            raise CurvlensError("The square loss has its own curvature: give target= alone, or grad= and curvature=.")
        _fits("target", target, shape, of, finite=False)
        c = 2 * scale / (length * width)
        gradient = c * (of.compute() - target.detach().reshape(of.shape))
        if not math.isfinite(float(gradient.sum())) and not gradient.isfinite().all():
            require_finite("target", target)
            raise CurvlensError("Outputs overflow: tokens and weights are too large for their dtype.")
        return OutputLoss(gradient, c, 0.0)
    if curvature is None:
        raise CurvlensError(
            "grad= needs curvature=, the second derivative at every output token: a tensor (…, L, d, d), a number c "
            "for c·I (0.0 for a loss linear in the output), or a pair (gauss_newton, rest)."
        )
    _fits("grad", grad, shape, of)
    if isinstance(curvature, (tuple, list)) and len(curvature) != 2:
        raise CurvlensError(f"curvature is one, or a pair (gauss_newton, rest); {len(curvature)} given.")
    outer, rest = curvature if isinstance(curvature, (tuple, list)) else (curvature, 0.0)
    # rounding is judged by the larger of a pair: the rest may be a difference of two equal numbers
    size = max(_size(part) for part in (outer, rest))
    named = (("curvature", outer), ("curvature[1]", rest))
    parts = [_curvature(name, part, shape, of, scale, size) for name, part in named]
    return OutputLoss(scale * grad.detach().reshape(of.shape), *parts)


def _size(part: Any) -> float:
    """The size of the largest entry of a curvature in any form."""
    if isinstance(part, Root):
        return _size(part.R) ** 2 * (part.R.shape[-1] if isinstance(part.R, Tensor) and part.R.ndim else 1)
    if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
        return 0.0 if part.layout != torch.strided or part.is_meta else largest(part)  # raises an error later
    return abs(float(part)) if isinstance(part, (int, float)) else 0.0


def _curvature(
    name: str, given: Any, shape: tuple[int, ...], of: Outputs, scale: float, size: float
) -> OutputCurvature:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not math.isfinite(given):
            raise CurvlensError(f"{name} is {given}; expected a finite number, a tensor or a Root.")
        return scale * given
    if isinstance(given, Root):
        if not isinstance(given.R, Tensor) or not given.R.ndim:
            raise CurvlensError(f"the root of {name} must have the shape {(*shape, 'r')}, for any r.")
        columns = given.R.shape[-1]
        _fits(f"the root of {name}", given.R, (*shape, columns), of)
        return Root(scale**0.5 * given.R.detach().reshape(*of.shape, columns))
    _fits(name, given, (*shape, shape[-1]), of)
    given = given.detach().reshape(*of.shape, shape[-1])
    matrices = given[counts(given)]  # often only some tokens have a loss
    asymmetry = float((matrices - matrices.mT).abs().max()) if len(matrices) else 0.0
    if asymmetry > 1e4 * torch.finfo(given.dtype).eps * size:
        raise CurvlensError(
            f"{name} is not symmetric (by {asymmetry:.2g}): it is ∂²ℓ/∂f², one symmetric matrix a token; "
            "if it is a square root R, give attention.Root(R)."
        )
    symmetric: Tensor = given if asymmetry == 0 else (given + given.mT) / 2
    return scale * symmetric


def _fits(name: str, given: Any, shape: tuple[int, ...], of: Outputs, *, finite: bool = True) -> None:
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else a_kind(given)
        what = "one matrix for each token of the output" if "curvature" in name else "that of the output"
        root = isinstance(given, Tensor) and given.shape[:-1] == shape[:-1] and name.startswith("curvature")
        hint = " A root R of it is given as attention.Root(R)." if root else ""
        if isinstance(given, Tensor) and of.heads > 1 and tuple(given.shape) == (*shape[:-1], of.heads * shape[-1]):
            hint = " Outputs of heads add up; where they are concatenated, give WV=(down, up) with up (heads, r, d)."
        raise CurvlensError(f"{name} must have the shape {shape}, {what}; got {got}.{hint}")
    of_one_kind({"X": of.like, name: given})
    if finite:
        require_finite(name, given)
