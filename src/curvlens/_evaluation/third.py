"""Three derivatives along a line: ∇L·u, uᵀHu and ∇³L[u, u, u].

The parameters are θ + t u with one number t, and three reverse passes differentiate by t. torch 2.13's third
derivatives of layer_norm, instance_norm and batch_norm over a batch are wrong, by 3 to 100 % and more, so all are
written out here, and a graph that has one of torch's all the same is refused; attention is computed by its plain
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens._evaluation.pieces import Piece
from curvlens.errors import CurvlensError
from curvlens.sdpa import scaled_dot_product_attention, second_order

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation


def _normed(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """(x − mean)/√(variance + ε), in the precision that torch's kernels use."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    centred = wide - wide.mean(axes, keepdim=True)
    return (centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()).to(x.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``torch.layer_norm`` in plain operations."""
    count = len(normalized_shape) if not isinstance(normalized_shape, int) else 1
    y = _normed(input, tuple(range(-count, 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm`` in plain operations."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    y = _normed(input, tuple(range(2, input.ndim)), eps)
    shape = (1, -1, *(1 for _ in range(input.ndim - 2)))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` in plain operations where it takes the statistics of its input."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    y = _normed(input, (0, *range(2, input.ndim)), eps)
    shape = (1, -1, *(1 for _ in range(input.ndim - 2)))
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def native_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.native_layer_norm`` in plain operations: also the mean and 1/√(variance + ε)."""
    axes = tuple(range(-len(normalized_shape), 0))
    mean = input.mean(axes, keepdim=True)
    rstd = ((input - mean).square().mean(axes, keepdim=True) + eps).rsqrt()
    return layer_norm(input, normalized_shape, weight, bias, eps), mean, rstd


class third_order(second_order):  # noqa: N801 - as `second_order`
    """Inside this block attention and the norms can be differentiated three times."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs, after=lambda _, x: x)
        if func in (F.layer_norm, torch.layer_norm):
            return layer_norm(*args, **kwargs)
        if func is torch.native_layer_norm:
            return native_layer_norm(*args, **kwargs)
        if func is F.instance_norm:
            return instance_norm(*args, **kwargs)
        if func is torch.instance_norm:
            return _torch_instance_norm(*args, **kwargs)
        if func is F.batch_norm:
            return batch_norm(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:
    """In the order of arguments of torch's own function."""
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _require_right(y: Tensor) -> None:
    """Raise if the graph has a step whose third derivative is wrong in torch 2.13."""
    todo, seen = [y.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if "LayerNormBackward" in name or ("BatchNormBackward" in name and getattr(node, "_saved_training", False)):
            raise CurvlensError(
                f"The model calls a normalisation of torch in a way that is not known here ({name}), and torch's third "
                "derivative of it is wrong. Use F.layer_norm, F.instance_norm or F.batch_norm, or leave third=True out."
            )
        todo += [child for child, _ in node.next_functions]


@dataclass(frozen=True)
class Course:
    """The three derivatives of the summed loss of one piece by t, at θ + t u and t = 0."""

    derivatives: list[float]
    count: float


def courses(evaluation: Evaluation, direction: Mapping[str, Tensor]) -> Iterator[Course]:
    """The derivatives along a direction, for every piece of the data."""
    for piece in evaluation.pieces():
        yield _along(evaluation, direction, piece)


def _along(evaluation: Evaluation, direction: Mapping[str, Tensor], piece: Piece) -> Course:
    t = torch.zeros((), dtype=torch.float64, device=evaluation.device, requires_grad=True)

    def action() -> Course:
        total, count = evaluation.sum_and_count(evaluation.loss_function.outputs(evaluation.model, piece.batch), piece)
        found, y = list[float](), total
        _require_right(y)
        for _ in range(3):
            if not y.requires_grad:
                found.append(0.0)
                continue
            (y,) = torch.autograd.grad(y, t, create_graph=True, materialize_grads=True)
            found.append(y.item())
        return Course(found, count)

    with torch.enable_grad(), evaluation.isolated():
        leaves = {
            name: p.detach() + (t * direction[name].to(t)).to(p.dtype)
            for name, p in evaluation.leaves(evaluation.layout.names).items()
        }
        return evaluation.at(cast("Mapping[str, nn.Parameter]", leaves), action, mode=third_order())
