"""A stack of attention layers: the Hessian of the whole, from the closed forms of its layers.

With T_l the derivative of layer l's tokens and weights by all weights θ, and λ_l the gradient at its output,

    H = T_outᵀ S T_out + Σ_l T_lᵀ (λ_l · D²f_l) T_l        (`docs/explanation/math.md`, "Attention: stacks").

The first term is the outer part. Tangents T go forward through the layers, gradients λ backward. No automatic
differentiation is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens.calculus.attention.along_tokens import along_tokens, pull, push
from curvlens.calculus.attention.blocks import slots
from curvlens.calculus.attention.inputs import AttentionInputs, Kind, Value, attention_inputs
from curvlens.calculus.curvature import OutputCurvature, applied
from curvlens.calculus.form import MatrixForm, Split
from curvlens.calculus.output_loss import OutputLoss, output_loss
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.room import require_room
from curvlens.errors import CurvlensError, a_kind


class StackHessian(Split):
    """``.outer``, ``.functional`` and ``.total`` of a stack of attention layers; blocks are ``Q1 K1 V1 Q2 …``."""

    def __init__(self, shapes: dict[str, tuple[int, int]], outer: Tensor, functional: Tensor) -> None:
        self.outer = MatrixForm(shapes, outer, "Outer part of a stack of attention layers")
        self.functional = MatrixForm(shapes, functional, "Functional part of a stack of attention layers")
        self.total = MatrixForm(shapes, outer + functional, "Hessian of a stack of attention layers")

    def __repr__(self) -> str:
        return f"StackHessian({self.total!r})"


@in_own_dtype
def stack(
    X: Tensor,
    layers: Sequence[tuple[Tensor, Tensor, Value]],
    target: Tensor | None = None,
    *,
    grad: Tensor | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    reduction: str = "mean",
) -> StackHessian:
    """The dense Hessian of D layers, each (WQ, WK, WV) as in `hessian`; the output of one layer is the next one's X.

    There are no skip connections and no norms: the paper's networks of linear attention (Section 4.1), or softmax.
    """
    if not layers:
        raise CurvlensError("A stack needs at least one layer (WQ, WK, WV).")
    built: list[AttentionInputs] = []
    tokens = X
    shapes: dict[str, tuple[int, int]] = {}
    for depth, given_layer in enumerate(layers, start=1):
        if not isinstance(given_layer, (tuple, list)) or len(given_layer) != 3:
            what = f"{len(given_layer)} of them" if isinstance(given_layer, (tuple, list)) else a_kind(given_layer)
            raise CurvlensError(f"Layer {depth} of the stack is three weights (WQ, WK, WV), got {what}.")
        wq, wk, wv = given_layer
        one = attention_inputs(tokens, wq, wk, wv, mask=mask, temperature=temperature, kind=kind, context=None)
        built.append(one)
        for slot in slots(one):
            shapes[f"{slot.letter}{depth}" + (f".{slot.head}" if wq.ndim == 3 else "")] = slot.shape
        tokens = one.output.reshape(*X.shape[:-2], *one.output.shape[1:])
    loss = output_loss(built[-1].outputs(X.shape[:-2]), target, grad, curvature, reduction)
    size = sum(a * b for a, b in shapes.values())
    require_room(
        5 * size**2 + 4 * size * X.numel(),  # three parts, directions of all weights and of the tokens
        X,
        "The Hessian of a stack, with the directions of all its weights,",
        "`cl.hessian` of a problem has products with vectors.",
    )

    # forward: the tangents of each layer's weights and tokens along all weights so far
    directions: list[dict[str, Tensor]] = []
    moved: Tensor | None = None  # (size, B, L, d)
    start = 0
    for one in built:
        given: dict[str, Tensor] = {}
        for letter, weight in (("Q", one.WQ), ("K", one.WK), ("V", one.down), ("O", one.up)):
            if weight is not None:
                given[letter] = X.new_zeros(size, *weight.shape)
        for slot in slots(one):
            count = slot.shape[0] * slot.shape[1]
            unit = torch.eye(count, dtype=X.dtype, device=X.device).view(count, *slot.shape)
            given[slot.letter][start : start + count, slot.head] = unit
            start += count
        if moved is not None:
            given["X"] = moved
        directions.append(given)
        moved = push(one, given).output
    assert moved is not None
    outer = _sandwich(moved, loss.outer)
    functional = _sandwich(moved, loss.rest)

    # backward: the gradient at each layer's output, and the layer's own second derivative
    g = loss.gradient
    for one, given in zip(reversed(built), reversed(directions), strict=True):
        found = along_tokens(one, OutputLoss(g, 0.0, 0.0), given, "functional")
        for letter, part in given.items():
            functional += part.flatten(1) @ found[letter].flatten(1).T
        by_query, by_key = pull(one, g)
        g = by_query + by_key
    return StackHessian(shapes, outer, functional)


def _sandwich(moved: Tensor, curvature: OutputCurvature) -> Tensor:
    """T S Tᵀ of directions (size, B, L, d)."""
    curved = applied(curvature, moved)
    return moved.new_zeros(len(moved), len(moved)) if curved is None else moved.flatten(1) @ curved.flatten(1).T
