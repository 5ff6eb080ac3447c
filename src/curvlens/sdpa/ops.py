"""The kernels as torch operators. Transformations see each of them as one step.

Each operator has a fake for tracing and a rule for ``vmap``, which merges the new axis with the samples. The gradient
of a missing or constant bias is an empty tensor, since operators return tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake, register_vmap

from curvlens.sdpa import kernels
from curvlens.sdpa.kernels import Inputs, Kept
from curvlens.sdpa.tiles import Spec

Maybe = Tensor | None

_library: Any = Library("curvlens", "DEF")  # type: ignore[no-untyped-call]


def _operator(function: Callable[..., Any]) -> Any:
    """Register a function as a torch operator, with the schema of its annotations.

    ``torch.library.custom_op`` is not used: its first call imports torch's compiler (800 modules, 1–2 seconds).
    """
    name = function.__name__
    _library.define(name + infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.curvlens, name).default


@_operator
def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe,
    scale: float, low: int | None, high: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and ℓ."""
    o, lse = kernels.attend(Inputs(q, k, v, bias, mask), Spec(scale, low, high, softcap))
    return o, lse


@_operator
def pull(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, lse: Tensor, g: Tensor, with_bias: bool,
    scale: float, low: int | None, high: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient by Q, K, V and, with ``with_bias``, the bias."""
    at, spec = Inputs(q, k, v, bias, mask), Spec(scale, low, high, softcap)
    dq, dk, dv, db = kernels.pull(at, Kept(o, lse), g, with_bias, spec)
    return dq, dk, dv, q.new_empty(0) if db is None else db


@_operator
def push(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, lse: Tensor,
    q1: Tensor, k1: Tensor, v1: Tensor, b1: Maybe,
    scale: float, low: int | None, high: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Ȯ along a direction."""
    at, along = Inputs(q, k, v, bias, mask), Inputs(q1, k1, v1, b1)
    return kernels.push(at, Kept(o, lse), along, Spec(scale, low, high, softcap))


@_operator
def bend(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, lse: Tensor, g: Tensor,
    q1: Tensor, k1: Tensor, v1: Tensor, b1: Maybe, g1: Maybe, with_bias: bool,
    scale: float, low: int | None, high: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The derivative of the gradient along a direction, and Ȯ."""
    at, along = Inputs(q, k, v, bias, mask), Inputs(q1, k1, v1, b1)
    dq, dk, dv, db, o1 = kernels.bend(at, Kept(o, lse), g, along, g1, with_bias, Spec(scale, low, high, softcap))
    return dq, dk, dv, q.new_empty(0) if db is None else db, o1


@_operator
def push_twice(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, lse: Tensor,
    q1: Tensor, k1: Tensor, v1: Tensor, b1: Maybe, q2: Tensor, k2: Tensor, v2: Tensor, b2: Maybe,
    scale: float, low: int | None, high: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """D²O along two directions."""
    at, one, other = Inputs(q, k, v, bias, mask), Inputs(q1, k1, v1, b1), Inputs(q2, k2, v2, b2)
    return kernels.push_twice(at, Kept(o, lse), one, other, Spec(scale, low, high, softcap))


# Fakes: results of the right shape and dtype, not computed


def _gradients(q: Tensor, k: Tensor, v: Tensor, bias: Maybe, with_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    db = bias.new_empty(bias.shape) if with_bias and bias is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), db


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = kernels.computed_in(q.dtype)
    return q.new_empty(*q.shape[:4], v.shape[-1], dtype=dtype), q.new_empty(*q.shape[:4], 2, dtype=dtype)


def _fake_pull(q: Tensor, k: Tensor, v: Tensor, bias: Maybe, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients(q, k, v, bias, rest[-5])


def _fake_bend(q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_gradients(q, k, v, bias, rest[-5]), o.new_empty(o.shape)


def _fake_push(q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, *_: Any) -> Tensor:
    return o.new_empty(o.shape)


def _in_front(x: Any, axis: int | None, size: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


def _rule(op: Any) -> Callable[..., tuple[Any, Any]]:
    def batched(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        first = [_in_front(x, axis, info.batch_size) for x, axis in zip(args, in_dims, strict=True)]
        (size, samples), bias = first[0].shape[:2], first[3]
        # tensors that all samples share may differ along the new axis, so they are expanded
        folded = [x.expand(size, samples, *x.shape[2:]).flatten(0, 1) if isinstance(x, Tensor) else x for x in first]
        result = op(*folded)
        if isinstance(result, Tensor):
            return result.reshape(size, samples, *result.shape[1:]), 0
        parts = [x.reshape(size, samples, *x.shape[1:]) if x.ndim > 1 else x for x in result]
        if bias is not None and len(parts) > 3 and parts[3].ndim > 1:
            parts[3] = parts[3].sum_to_size(bias.shape)
        return tuple(parts), tuple(0 if x.ndim > 1 else None for x in parts)

    return batched


for _op, _fake in (
    (attend, _fake_attend),
    (pull, _fake_pull),
    (push, _fake_push),
    (bend, _fake_bend),
    (push_twice, _fake_push),
):
    register_fake(_op, _fake, lib=_library)
    register_vmap(_op, _rule(_op), lib=_library)
