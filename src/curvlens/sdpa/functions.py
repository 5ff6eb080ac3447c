"""Attention as autograd functions with two derivatives, in any order of forward and reverse mode.

    Attend    (Q, K, V, bias) ↦ O     reverse: Pull          forward: Push
    Pull      (…, G) ↦ gradient       reverse: Bend, Ȯ       forward: Bend with Ġ
    Push      (…, direction) ↦ Ȯ      reverse: Bend, Pull    forward: PushTwice + Push
    Bend, PushTwice                   linear in G and the directions: each other, in both modes

A derivative of Bend or PushTwice by Q, K, V or the bias would be a third derivative. O and ℓ are passed to the
derivatives as constants: each derivative is a function of Q, K, V, the bias and G or a direction, and its own
derivative accounts for the dependence of O on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.sdpa import autocast, ops
from curvlens.sdpa.tiles import Spec

Maybe = Tensor | None
THIRD = (
    "A third derivative of attention is needed, but curvlens has only two beyond 256 keys. To differentiate a Hessian "
    "product by its direction alone, name the direction: torch.autograd.grad(..., direction). For higher derivatives "
    "call F.scaled_dot_product_attention inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH), outside of "
    "curvlens.second_order()."
)
BATCHED = torch._C._dispatch_key_parse("Batched")
"""The dispatch key of batched gradients in torch.autograd.grad; torch.func uses another one."""
LOST = (
    "Batched gradients of attention with a graph are not possible: with is_grads_batched=True (or vectorize=True) and "
    "create_graph=True torch loses the graph. Use torch.func.vmap over torch.func.vjp, or torch.func.jacrev."
)


class _Function(torch.autograd.Function):
    """The inputs are tensors, then the `Spec`."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.spec = inputs
        ctx.there = [x is not None for x in tensors]
        ctx.set_materialize_grads(False)  # zero gradients stay None and cost nothing
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _WithBias(_Function):
    """The inputs are tensors, whether the gradient by the bias is needed, then the `Spec`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.with_bias, spec = inputs
        _Function.setup_context(ctx, (*tensors, spec), output)


class Attend(_Function):
    """O and ℓ; ℓ is not differentiable."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, spec: Spec) -> Any:
        return _run(ops.attend, (q, k, v, bias, mask), spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.spec = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, g: Maybe, _: Maybe) -> tuple[Maybe, ...]:
        if g is None:  # a derivative below used O, as a constant
            return (None,) * 6
        _keep_graph(g)
        return *_apply(Pull, *ctx.saved_tensors, g, ctx.needs_input_grad[3], ctx.spec), None, None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors
        return _apply(Push, *saved, *_filled(saved, along[:4]), ctx.spec), None


class Pull(_WithBias):
    """(q, k, v, bias, mask, o, lse, g) ↦ the gradient by Q, K, V and the bias."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, with_bias, spec = inputs
        return _run(ops.pull, tensors, spec, with_bias)

    @staticmethod
    def backward(ctx: Any, *u: Maybe) -> tuple[Maybe, ...]:
        if all(x is None for x in u):
            return (None,) * 10
        _keep_graph(*u)
        *at, g = ctx.saved_tensors
        *own, o = _apply(Bend, *at, g, *_filled(at, u), None, ctx.needs_input_grad[3], ctx.spec)
        return *own, None, None, None, o, None, None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> tuple[Maybe, ...]:
        *at, g = ctx.saved_tensors
        bent: tuple[Maybe, ...] = _apply(Bend, *at, g, *_filled(at, along[:4]), along[7], ctx.with_bias, ctx.spec)
        return bent[:4]


class Push(_Function):
    """(q, k, v, bias, mask, o, lse, and a direction by q, k, v, bias) ↦ Ȯ."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, spec = inputs
        return _run(ops.push, tensors, spec)

    @staticmethod
    def backward(ctx: Any, g: Maybe) -> tuple[Maybe, ...]:
        if g is None:
            return (None,) * 12
        _keep_graph(g)
        at, along = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        return *_of_push(ctx, at, along, g, ctx.needs_input_grad[7:11]), None

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Tensor:
        at, along = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        second: Tensor = _apply(PushTwice, *at, *along, *_filled(at, moved[:4]), ctx.spec)
        if _still(moved[7:11]):
            return second
        first: Tensor = _apply(Push, *at, *_filled(at, moved[7:11]), ctx.spec)
        return second + first


class Bend(_WithBias):
    """(as `Pull`, a direction by q, k, v, bias, and Ġ) ↦ the derivative of the gradient along it, and Ȯ.

    With gradients w at the first outputs and u at Ȯ, and since D²⟨G, O⟩ is symmetric,
    ⟨w, Bend⟩ = D²⟨G, O⟩[direction, w] + D⟨Ġ, O⟩[w] + D⟨u, O⟩[direction].
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, with_bias, spec = inputs
        return _run(ops.bend, tensors, spec, with_bias)

    @staticmethod
    def backward(ctx: Any, *given: Maybe) -> tuple[Maybe, ...]:
        _keep_graph(*given)
        *w, u = given
        at, g, along = ctx.saved_tensors[:7], ctx.saved_tensors[7], ctx.saved_tensors[8:12]
        needs = ctx.needs_input_grad
        if _still(w):
            if u is None:
                return (None,) * 15
            own = _of_push(ctx, at, along, u, needs[8:12])
            return *own[:7], None, *own[7:], None, None, None
        _refuse_third(ctx)
        w = _filled(at, w)
        by_direction: Sequence[Maybe] = (None,) * 5
        if any(needs[8:13]):
            by_direction = _apply(Bend, *at, g, *w, u, needs[11], ctx.spec)
        by_g = _apply(PushTwice, *at, *along, *w, ctx.spec) if needs[7] else None
        *by_along, by_g_along = by_direction
        return *(None,) * 7, by_g, *by_along, by_g_along if needs[12] else None, None, None

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> tuple[Maybe, ...]:
        if not _still(moved[:4]):
            raise CurvlensError(THIRD)
        at, g, along = ctx.saved_tensors[:7], ctx.saved_tensors[7], ctx.saved_tensors[8:12]
        how = ctx.with_bias, ctx.spec
        *own, o = _apply(Bend, *at, g, *_filled(at, moved[8:12]), moved[12], *how)
        if moved[7] is not None:  # Ȯ does not depend on G
            other = _apply(Bend, *at, moved[7], *along, None, *how)[:4]
            own = [None if x is None else x + y for x, y in zip(own, other, strict=True)]
        return *own, o


class PushTwice(_Function):
    """(as `Push`, and another direction) ↦ D²O along both."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, spec = inputs
        return _run(ops.push_twice, tensors, spec)

    @staticmethod
    def backward(ctx: Any, g: Maybe) -> tuple[Maybe, ...]:
        if g is None:
            return (None,) * 16
        _keep_graph(g)
        _refuse_third(ctx)
        at, pair = ctx.saved_tensors[:7], (ctx.saved_tensors[7:11], ctx.saved_tensors[11:])
        found: list[Maybe] = []
        for needs, other in ((ctx.needs_input_grad[7:11], pair[1]), (ctx.needs_input_grad[11:15], pair[0])):
            found += _apply(Bend, *at, g, *other, None, needs[3], ctx.spec)[:4] if any(needs) else (None,) * 4
        return *(None,) * 7, *found, None

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Tensor:
        if not _still(moved[:4]):
            raise CurvlensError(THIRD)
        at, one, other = ctx.saved_tensors[:7], ctx.saved_tensors[7:11], ctx.saved_tensors[11:]
        first: Tensor = _apply(PushTwice, *at, *_filled(at, moved[7:11]), *other, ctx.spec)
        second: Tensor = _apply(PushTwice, *at, *one, *_filled(at, moved[11:15]), ctx.spec)
        return first + second


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def _keep_graph(*gradients: Maybe) -> None:
    """Raise an error if torch would lose the graph of a gradient."""
    if torch.is_grad_enabled() and any(x is not None and torch._C._dispatch_keys(x).has(BATCHED) for x in gradients):
        raise CurvlensError(LOST)


def _run(op: Any, tensors: Sequence[Maybe], spec: Spec, *with_bias: bool) -> Any:
    """Call an operator. The gradient of a bias is None if there is no bias or it needs no gradient."""
    with autocast.off(tensors[0].device if tensors[0] is not None else torch.device("cpu")):
        result = op(*tensors, *with_bias, *dataclasses.astuple(spec))
    if not with_bias or (tensors[3] is not None and with_bias[0]):
        return result
    return *result[:3], None, *result[4:]


def _of_push(ctx: Any, at: Sequence[Maybe], along: Sequence[Maybe], g: Tensor, needs: Sequence[bool]) -> list[Maybe]:
    """The gradient of ⟨G, Ȯ⟩ by Q, K, V, the bias, mask, O, ℓ and the direction."""
    own: Sequence[Maybe] = (None,) * 4
    if any(ctx.needs_input_grad[:4]):
        own = _apply(Bend, *at, g, *along, None, ctx.needs_input_grad[3], ctx.spec)[:4]
    first = _apply(Pull, *at, g, needs[3], ctx.spec) if any(needs) else (None,) * 4
    return [*own, None, None, None, *first]


def _refuse_third(ctx: Any) -> None:
    """Raise an error if the current backward pass continues to Q, K, V or the bias.

    ``needs_input_grad`` is not enough: it is True for each tensor that requires a gradient, also if this pass does not
    compute it.
    """
    nodes = iter(ctx.next_functions)  # one for each tensor that is not None
    for needed, there in zip(ctx.needs_input_grad[:4], ctx.there[:4], strict=True):
        node = next(nodes)[0] if there else None
        if needed and node is not None and _is_run(node):
            raise CurvlensError(THIRD)


def _is_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is computed
        return True


def _still(along: Sequence[Any]) -> bool:
    return all(x is None for x in along)


def _filled(at: Sequence[Maybe], along: Sequence[Maybe]) -> list[Maybe]:
    """A direction with zeros for missing parts of Q, K and V. The part of the bias may stay None."""
    *given, bias = along
    pairs = zip(at[:3], given, strict=True)
    return [*(torch.zeros_like(x) if u is None and x is not None else u for x, u in pairs), bias]
