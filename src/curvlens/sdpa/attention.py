"""`scaled_dot_product_attention`: torch's signature, two derivatives in every mode, and linear memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.sdpa import autocast, plain
from curvlens.sdpa.functions import Attend
from curvlens.sdpa.kernels import Inputs, computed_in
from curvlens.sdpa.tiles import Spec

SHORT = 256
"""Up to this number of keys the plain formula is faster than tiles."""
Causal = bool | Literal["top-left", "bottom-right"]
Window = int | tuple[int | None, int | None]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    after: plain.Step | None = None,
) -> Tensor:
    """softmax(scale · Q Kᵀ + bias) V, as ``torch.nn.functional.scaled_dot_product_attention``.

    It can be differentiated twice, in forward mode, reverse mode and any mixture. It never stores the matrix of scores,
    so memory grows with the length, not with its square. The output and derivatives of a query that sees no key are 0.
    A third derivative is an error beyond 256 keys.

    Args:
        query: (…, heads, L, d).
        key: (…, heads, M, d); (…, groups, M, d) with ``enable_gqa``.
        value: (…, heads, M, e), or groups.
        attn_mask: booleans, True where a query may attend, or numbers to add to the scores. The shape must broadcast to
            (…, heads, L, M); the mask is never expanded in memory. A ``CausalBias`` of torch works too.
        dropout_p: must be 0, since a random loss has no second derivative.
        is_causal: a query sees no later keys. True and "top-left": query i sees the keys up to i; "bottom-right": the
            last query sees the last key. It may be combined with a mask.
        scale: factor of the scores; 1/√d by default.
        enable_gqa: consecutive heads of queries share a head of keys.
        bias: numbers to add to the scores, for learned biases such as relative positions. Its derivative has its shape,
            so use size 1 for each axis that it does not depend on.
        window: w: a query sees the keys less than w positions away. Or (before, after): how many keys it sees on each
            side of its own position, None for all. Positions are aligned as by ``is_causal``.
        softcap: t: the scores become t tanh(scale · Q Kᵀ/t).
        after: called with the name and the result of each step ("scores", "softmax", "mix"); its return value replaces
            the result. All scores are then stored.

    >>> q = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    >>> y = scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> (g,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    >>> torch.autograd.grad(g.square().sum(), q)[0].shape
    torch.Size([1, 2, 5, 4])
    """
    if dropout_p:
        raise CurvlensError(
            f"Attention dropout of {dropout_p} is active: a random loss has no second derivative. Call model.eval(), "
            "or set the dropout of attention to 0 (dropout=0, attention_dropout=0, attn_pdrop=0)."
        )
    query, key, value = autocast.taken(query, key, value)
    _check(query, key, value, enable_gqa)
    width = query.shape[-1]
    attn_mask, is_causal = _causal_bias(attn_mask, is_causal, query.shape[-2], key.shape[-2])
    low, high = _sight(is_causal, window, query.shape[-2], key.shape[-2])
    cap = None if softcap is None else _number("softcap", softcap, 0.0)
    if cap is not None and not cap > 0:
        raise CurvlensError(f"softcap={softcap!r}; expected a positive number.")
    spec = Spec(_number("scale", width**-0.5 if scale is None and width else scale, 1.0), low, high, cap)
    q, k, v, outer = _by_groups(query, key, value)
    mask, added = _masks(attn_mask, bias, query, outer, q.shape, key.shape[-2])
    at = Inputs(q, k, v, added, mask)
    with autocast.off(query.device):
        if after is not None or key.shape[-2] <= SHORT:
            o = plain.attend(at, spec) if after is None else plain.attend(at, spec, after)
        else:
            o = _by_tiles(at, spec) if not torch.compiler.is_dynamo_compiling() else _not_compiled(at, spec)
        return o.to(query.dtype).reshape(*outer, query.shape[-2], value.shape[-1])


def _by_tiles(at: Inputs, spec: Spec) -> Tensor:
    o: Tensor = Attend.apply(*at, spec)[0]  # type: ignore[no-untyped-call]
    return o


_not_compiled = torch._compile._disable_dynamo(_by_tiles)
"""torch.compile must not trace it: its own forward mode for autograd functions returns zero tangents."""


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; ValueError if there is none. torch handles traced (symbolic) sizes."""
    if all(type(side) is int for shape in shapes for side in shape):
        # not torch.broadcast_shapes: its first call imports sympy, which takes half a second
        return tuple(map(int, np.broadcast_shapes(*map(tuple, shapes))))
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _scalar(x: Any) -> Any:
    """The number in a tensor without axes that needs no gradient; anything else unchanged."""
    return x.item() if isinstance(x, Tensor) and x.ndim == 0 and not x.requires_grad else x


def _number(name: str, given: Any, default: float) -> float:
    found = default if given is None else _scalar(given)
    if isinstance(found, bool) or not isinstance(found, Real) or not math.isfinite(found):
        raise CurvlensError(f"{name}={given!r}; expected a number.")
    return float(found)


def _causal_bias(mask: Any, causal: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """Translate torch's ``causal_upper_left`` and ``causal_lower_right``, which hold no numbers, to ``is_causal``."""
    bias = sys.modules.get("torch.nn.attention.bias")  # not imported here: that would load 800 modules
    if bias is None or not isinstance(mask, bias.CausalBias):
        return mask, causal
    if causal:
        raise CurvlensError(f"attn_mask is a CausalBias and is_causal={causal!r}. Give only one of them.")
    if (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
        raise CurvlensError(
            f"attn_mask is a CausalBias for {mask.seq_len_q} queries and {mask.seq_len_kv} keys; expected one for "
            f"{queries} and {keys}."
        )
    return None, "bottom-right" if mask.variant == bias.CausalVariant.LOWER_RIGHT else "top-left"


def _check(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_nested:
            raise CurvlensError(
                f"{name} is a nested tensor; expected a padded one. Call x.to_padded_tensor(0) and give a mask."
            )
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            what = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise CurvlensError(f"{name} is {what}; expected real numbers (…, heads, length, features).")
        if (x.dtype, x.device) != (query.dtype, query.device):
            raise CurvlensError(
                f"query is {query.dtype} on {query.device}, {name} is {x.dtype} on {x.device}. Convert them to the "
                f"same dtype and device: {name}.to(query)."
            )
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
    if query.shape[-1] != key.shape[-1]:
        raise CurvlensError(f"query and key need the same number of features; got {shapes}.")
    if key.shape[-2] != value.shape[-2]:
        raise CurvlensError(f"key and value need the same length; got {shapes}.")
    heads_of = {x.shape[-3] for x in given.values() if x.ndim > 2}
    if 0 in heads_of and len(heads_of) > 1:
        raise CurvlensError(f"query, key and value need the same number of heads, but one has none; got {shapes}.")
    lead = -2  # the axes before this one must broadcast
    if enable_gqa and query.ndim > 2:
        lead, heads, groups = -3, query.shape[-3], {x.shape[-3] if x.ndim > 2 else 1 for x in (key, value)}
        if len(groups - {1}) > 1 or any(not group or heads % group for group in groups):
            raise CurvlensError(
                f"enable_gqa: keys and values need the same number of heads, which must divide that of the queries; "
                f"got {shapes}."
            )
    try:
        _broadcast(query.shape[:lead], key.shape[:lead], value.shape[:lead])
    except ValueError as error:
        heads = {x.shape[-3] for x in given.values() if x.ndim > 2}
        hint = " If query heads share keys, give enable_gqa=True." if lead == -2 and len(heads) > 1 else ""
        raise CurvlensError(f"The leading axes do not fit: {shapes}.{hint}") from error


def _sight(causal: Any, window: Any, queries: int, keys: int) -> tuple[int | None, int | None]:
    """The first and the last key that a query sees, relative to its own index; None without a bound."""
    if causal not in (None, False, True, "top-left", "bottom-right"):
        raise CurvlensError(f"is_causal={causal!r}; expected False, True, 'top-left' or 'bottom-right'.")
    own = keys - queries if causal == "bottom-right" else 0
    high = own if causal else None
    if window is None:
        return None, high
    before, behind = _sides(window)
    ahead = [x for x in (high, None if behind is None else own + behind) if x is not None]
    return None if before is None else own - before, min(ahead, default=None)


def _sides(window: Any) -> tuple[int | None, int | None]:
    """The number of keys that a query sees before and after its own position."""
    given = tuple(map(_scalar, window)) if isinstance(window, (tuple, list)) else _scalar(window)
    sides = (given - 1,) * 2 if isinstance(given, Integral) and not isinstance(given, bool) else given
    sound = isinstance(sides, tuple) and len(sides) == 2
    if not sound or any(isinstance(s, bool) or not isinstance(s, Integral | None) or (s or 0) < 0 for s in sides):
        raise CurvlensError(f"window={window!r}; expected a number of keys, 1 or more, or a pair (before, after).")
    before, behind = (None if s is None else int(s) for s in sides)
    return before, behind


def _by_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q (B, H, g, L, d), k and v (B, H, M, ·), and the leading axes of the result."""
    q, k, v = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    heads, groups = q.shape[-3], max(k.shape[-3], v.shape[-3])
    batch = _broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if heads < groups:  # one head of queries for all keys
        q, heads = q.expand(*q.shape[:-3], groups, *q.shape[-2:]), groups
    k, v = (
        x.expand(*batch, groups, *x.shape[-2:]).flatten(0, -4) if batch else x[None].expand(1, groups, -1, -1)
        for x in (k, v)
    )
    q = q.expand(*batch, *q.shape[-3:])
    q = q.reshape(math.prod(batch), groups, heads // groups if groups else 0, *q.shape[-2:])
    outer = (*batch, heads) if max(query.ndim, key.ndim, value.ndim) > 2 else ()
    return q, k, v, outer


def _masks(
    mask: Any, bias: Any, query: Tensor, outer: tuple[int, ...], shape: torch.Size, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """The boolean mask and the numbers to add to the scores, with five axes and not expanded."""
    full = (*outer, query.shape[-2], keys)
    added: Tensor | None = None
    seen: Tensor | None = None
    for name, x in (("attn_mask", mask), ("bias", bias)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or not (x.is_floating_point() or (x.dtype == torch.bool and name == "attn_mask")):
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            kinds = "real numbers, or booleans" if name == "attn_mask" else "real numbers"
            raise CurvlensError(f"{name} is {what}; expected a tensor of {kinds}.")
        if x.device != query.device:
            raise CurvlensError(f"query is on {query.device}, {name} on {x.device}. Use {name}.to(query.device).")
        try:
            fits = _broadcast(x.shape, full) == full
        except ValueError:
            fits = False
        if not fits:
            raise CurvlensError(f"{name} has shape {tuple(x.shape)}; expected one that can be broadcast to {full}.")
        x = _five_axes(x, outer, shape)
        if x.dtype == torch.bool:
            seen = x
        else:
            x = x.to(computed_in(query.dtype))
            added = x if added is None else added + x
    return seen, added


def _five_axes(x: Tensor, outer: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Reshape (…, heads, L, M), where axes may be missing or of size 1, to (B, H, g, L, M)."""
    x = x.reshape(*(1,) * (len(outer) + 2 - x.ndim), *x.shape)
    batch, groups, per_group = shape[:3]
    heads, rest = (x.shape[-3] if outer else 1), x.shape[-2:]
    split = (groups, per_group) if heads != 1 else (1, 1)
    lead = x.shape[: len(outer) - 1] if outer else ()
    if math.prod(lead) == 1:
        return x.reshape(1, *split, *rest)
    return x.expand(*outer[:-1], *x.shape[-3:]).reshape(batch, *split, *rest)
