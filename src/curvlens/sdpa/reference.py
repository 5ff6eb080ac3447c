"""Scaled dot-product attention written out, softmax(c Q Kᵀ + mask) V, so that every derivative of it exists."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.errors import CurvlensError

Step = Callable[[str, Tensor], Tensor]
"""(name of a step, what it gives) → what the next step takes."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    after: Step = lambda name, x: x,
) -> Tensor:
    """The same as ``torch.nn.functional.scaled_dot_product_attention``, at L×L memory.

    A boolean mask is True where a query may look, any other mask is added to the scores; a causal mask is aligned top
    left; a query that may look nowhere gets 0. ``after`` is shown what the steps "scores", "softmax" and "mix" give.
    """
    if dropout_p:
        raise CurvlensError(f"Attention dropout of {dropout_p} is active: a random loss has no Hessian. model.eval()")
    if enable_gqa:
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = after("scores", (query * scale) @ key.transpose(-1, -2))
    attention = after("softmax", _softmax(scores, attn_mask, is_causal))
    return after("mix", attention @ value)


def _softmax(scores: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    allowed: Tensor | None = None
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            allowed = attn_mask if allowed is None else allowed & attn_mask
        else:
            reachable = attn_mask != -math.inf
            # Only now is -inf taken out of the sum: inf - inf in a row without a reachable key would be NaN.
            scores = scores + attn_mask.masked_fill(~reachable, 0.0).to(scores.dtype)
            allowed = reachable if allowed is None else allowed & reachable
    if allowed is None:
        return scores.softmax(-1)
    attention = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
    if attn_mask is not None:  # a causal mask alone leaves every query its own key
        attention = attention.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return attention


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Give every group of query heads its own view of the shared key or value head."""
    heads, groups = query.shape[-3], x.shape[-3]
    return x if heads == groups else x.repeat_interleave(heads // groups, dim=-3)
