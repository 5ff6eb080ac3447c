"""Attention in plain operations, softmax(c Q Kᵀ + bias) V. It has all derivatives, and stores all scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.sdpa.kernels import Inputs, computed_in
from curvlens.sdpa.tiles import Spec

Step = Callable[[str, Tensor], Tensor]
"""(name of a step, its result) → the input of the next step."""


def attend(at: Inputs, spec: Spec, after: Step = lambda name, x: x) -> Tensor:
    """O, as in `curvlens.sdpa.kernels.attend`; ``after`` gets the results of "scores", "softmax" and "mix"."""
    q, k, v = (x.to(computed_in(x.dtype)) for x in (at.q, at.k, at.v))
    batch, heads, groups, length, _ = q.shape
    apart = (batch, heads, groups, length)
    # stack the queries that share a head of keys
    scores = after("scores", ((q * spec.scale).flatten(2, 3) @ k.mT).view(*apart, k.shape[2]))
    p = after("softmax", _softmax(scores, at, spec))
    return after("mix", (p.flatten(2, 3) @ v).view(*apart, v.shape[3])).to(at.q.dtype)


def _softmax(scores: Tensor, at: Inputs, spec: Spec) -> Tensor:
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    seen = _seen(scores, spec)
    if at.mask is not None:
        seen = at.mask if seen is None else seen & at.mask
    if at.bias is not None:
        reachable = at.bias != -math.inf
        # Replace −∞ by 0 before the sum: in a row without a visible key ∞ − ∞ would be NaN.
        scores = scores + at.bias.masked_fill(~reachable, 0.0)
        seen = reachable if seen is None else seen & reachable
    if seen is None:
        return scores.softmax(-1)
    if at.mask is None and at.bias is None and spec.high in (None, 0) and spec.low is None:
        # Every query sees a key: adding −∞ is cheaper to differentiate. It gives NaN if a hidden score is infinite.
        return (scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, -math.inf)).softmax(-1)
    blind = ~seen.any(-1, keepdim=True)
    # a row of −∞ alone would be NaN
    hidden = torch.zeros_like(blind, dtype=scores.dtype).masked_fill(~blind, -math.inf)
    return torch.where(seen, scores, hidden).softmax(-1).masked_fill(blind, 0.0)


def _seen(scores: Tensor, spec: Spec) -> Tensor | None:
    """Where a query sees a key, (queries, keys). None if it sees all keys."""
    if spec.low is None and spec.high is None:
        return None
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    seen = seen if spec.high is None else seen.tril(spec.high)
    return seen if spec.low is None else seen.triu(spec.low)
