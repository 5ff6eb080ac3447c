"""Attention as functions that autograd can differentiate twice, in every order of forward and reverse mode.

    Attend    (Q, K, V, bias) ↦ O     reverse: Pull          forward: Push
    Pull      (…, G) ↦ gradient       reverse: Bend, Ȯ       forward: Bend with Ġ
    Push      (…, direction) ↦ Ȯ      reverse: Bend, Pull    forward: PushTwice + Push
    Bend, PushTwice                   nothing behind them: third derivatives are refused

O and ℓ are handed on to the derivatives as numbers: each of these is a function of Q, K, V, the bias and G or a
direction alone, and its derivative takes into account that O moves with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.sdpa import ops
from curvlens.sdpa.tiles import Spec

Maybe = Tensor | None
THIRD = (
    "A third derivative of attention was asked for; curvlens has the first two. For more take the written-out formula: "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), outside of curvlens.second_order()."
)


class _Function(torch.autograd.Function):
    """Tensors first, and what they are put together by last."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.spec = inputs
        ctx.set_materialize_grads(False)  # what does not move is not computed with
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class Attend(_Function):
    """O, and ℓ, which has no derivative of its own."""

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
        if g is None:  # the derivatives below take O as a number
            return (None,) * 6
        dq, dk, dv, db = Pull.apply(*ctx.saved_tensors, g, ctx.spec)  # type: ignore[no-untyped-call]
        return dq, dk, dv, db, None, None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors
        return Push.apply(*saved, *_filled(saved, along[:4]), ctx.spec), None  # type: ignore[no-untyped-call]


class Pull(_Function):
    """(q, k, v, bias, mask, o, lse, g) ↦ the gradient by Q, K, V and the bias."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, spec = inputs
        return _run(ops.pull, tensors, spec)

    @staticmethod
    def backward(ctx: Any, *u: Maybe) -> tuple[Maybe, ...]:
        if all(x is None for x in u):
            return (None,) * 9
        *at, g = ctx.saved_tensors
        q, k, v, b, o = Bend.apply(*at, g, *_filled(at, u), None, ctx.spec)  # type: ignore[no-untyped-call]
        return q, k, v, b, None, None, None, o, None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> tuple[Maybe, ...]:
        *at, g = ctx.saved_tensors
        bent: tuple[Maybe, ...] = Bend.apply(  # type: ignore[no-untyped-call]
            *at, g, *_filled(at, along[:4]), along[7], ctx.spec
        )
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
        at, along = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        own: Sequence[Maybe] = (None,) * 4
        if any(ctx.needs_input_grad[:4]):
            own = Bend.apply(*at, g, *along, None, ctx.spec)[:4]  # type: ignore[no-untyped-call]
        first: Sequence[Maybe] = (None,) * 4
        if any(ctx.needs_input_grad[7:11]):
            first = Pull.apply(*at, g, ctx.spec)  # type: ignore[no-untyped-call]
        return (*own, None, None, None, *first, None)

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Tensor:
        at, along = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        second: Tensor = PushTwice.apply(  # type: ignore[no-untyped-call]
            *at, *along, *_filled(at, moved[:4]), ctx.spec
        )
        if all(x is None for x in moved[7:11]):
            return second
        first: Tensor = Push.apply(*at, *_filled(at, moved[7:11]), ctx.spec)  # type: ignore[no-untyped-call]
        return second + first


class _Last(_Function):
    """A second derivative: there is no third."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CurvlensError(THIRD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise CurvlensError(THIRD)


class Bend(_Last):
    """(as `Pull`, a direction by q, k, v, bias, and Ġ) ↦ the derivative of the gradient along it, and Ȯ."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, spec = inputs
        return _run(ops.bend, tensors, spec)


class PushTwice(_Last):
    """(as `Push`, and another direction) ↦ D²O along both."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, spec = inputs
        return _run(ops.push_twice, tensors, spec)


def _run(op: Any, tensors: Sequence[Maybe], spec: Spec) -> Any:
    """What an operator gives; None for the gradient of a bias that is not there."""
    result = op(*tensors, *dataclasses.astuple(spec))
    if isinstance(result, Tensor) or len(result) < 4 or tensors[3] is not None:
        return result
    return *result[:3], None, *result[4:]


def _filled(at: Sequence[Maybe], along: Sequence[Maybe]) -> list[Maybe]:
    """A direction by Q, K, V and the bias, with zeros where nothing moves."""
    given = zip(at[:4], along, strict=True)
    return [None if x is None else torch.zeros_like(x) if u is None else u for x, u in given]
