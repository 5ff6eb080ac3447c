"""What attention looks at: entropy, sinks and moments of every head, from one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlens import batches
from curvlens.analysis.moments import sizes
from curvlens.analysis.projections import Projections, Site, layouts, near
from curvlens.problem import Problem
from curvlens.sdpa.mode import INSIDE
from curvlens.surroundings import within

LARGEST = 1 << 28
"""Numbers of one matrix of attention weights, over all samples and heads; larger ones are not looked at."""


@dataclass(frozen=True)
class Call:
    """One call of attention: its weights (B, heads, L_q, L_k), and what was seen around it."""

    place: str | None
    """The attention whose queries were made last before, as ``h.0.attn``."""
    A: Tensor
    scale: float | None
    """τ, where attention is one function of torch."""
    query: Tensor | None
    value: Tensor | None


class Watch(TorchFunctionMode):
    """Looks at all attention weights: those of fused kernels are computed beside them, those of a softmax are seen.

    With ``only`` the weights of this attention alone are computed, and what its output projection takes becomes a
    leaf, where a graph begins.
    """

    def __init__(self, projections: Projections, each: Callable[[Call], None], *, only: str | None = None) -> None:
        super().__init__()
        self.projections, self.each, self.only = projections, each, only
        self.leaf: Tensor | None = None
        self.order: list[str | None] = []
        """The attentions in the order of their calls; None for one without named queries."""
        self.skipped = 0
        self._place: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._fused(*args, **given)
            return func(*args, **given)
        if func in INSIDE:
            return within([self], lambda: INSIDE[func](*args, **given))
        used = self.projections.used(func, args, given)
        args, given = (args, given) if used is None else self._product(*used, args, given)
        result = func(*args, **given)
        if used is None:
            self.projections.follow(args, result)
        if func in (torch.softmax, F.softmax, Tensor.softmax) and _is_weights(result) and self._wanted():
            self._see(result, None, None, None)
        return result

    def _product(
        self, sites: list[Site], tokens: Tensor, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self.projections.saw(sites, tokens)
        self._place = next((site.place for site in sites if site.role == "q"), self._place)
        if self.only is None or Site(self.only, "o") not in sites:
            return args, kwargs
        leaf = self.leaf = tokens.detach().requires_grad_()
        changed: tuple[Any, dict[str, Any]] = batches.map_tensors(lambda x: leaf if x is tokens else x, (args, kwargs))
        return changed

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> None:
        if not self._wanted():
            return
        if query.ndim != 4 or query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] > LARGEST:
            self.skipped += 1
            return
        precise = torch.promote_types(query.dtype, torch.float32)
        q, k = query.detach().to(precise), key.detach().to(precise)
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        tau = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = q @ k.mT * tau
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, -math.inf)
                if attn_mask.dtype == torch.bool
                else scores + attn_mask.to(precise)
            )
        v = value.detach()
        v = v if v.shape[1] == q.shape[1] else v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        self._see(scores.softmax(-1), tau, q, v)

    def _wanted(self) -> bool:
        """Take note of a call; whether its weights are looked at."""
        self.order.append(self._place)
        self._place = None
        return self.only is None or self.only == self.order[-1]

    def _see(self, weights: Tensor, scale: float | None, query: Tensor | None, value: Tensor | None) -> None:
        if weights.numel() > LARGEST:
            self.skipped += 1
        else:
            self.each(Call(self.order[-1], weights.detach().nan_to_num(), scale, query, value))


def _is_weights(result: Any) -> bool:
    return isinstance(result, Tensor) and result.ndim == 4


def tokens_of(call: Call, projections: Projections, role: str) -> Tensor | None:
    """The tokens X (B, L, d) that the queries, keys or values of a call are made of; None if they were not seen."""
    if call.place is None:
        return None
    x = projections.inputs.get(Site(call.place, role))
    samples, n = call.A.shape[0], call.A.shape[-2 if role == "q" else -1]
    found = [] if x is None else list(layouts(x, samples, n))
    seen = call.query if role == "q" else call.value
    weights = projections.weights(Site(call.place, "q" if role == "q" else "v"))
    if len(found) > 1 and seen is not None and weights is not None:  # the right one gives the values that were seen
        made = (weights.of(X.to(weights.W)).repeat_interleave(seen.shape[1] // len(weights.W), 1) for X in found)
        return next((X for X, own in zip(found, made, strict=True) if near(own, seen)), found[0])
    return found[0] if found else None


def described(call: Call, projections: Projections) -> dict[str, Any]:
    """Entropy, sinks and moments of a call, by head."""
    A = call.A.double()
    support = (A > 0).sum(-1).clamp(min=1).double()
    entropy = -(A * A.clamp(min=1e-300).log()).sum(-1)
    rows = support > 1  # a token that sees itself alone has no choice
    found: dict[str, Any] = {
        "block": call.place or "",
        "entropy": _by_head(entropy, rows),
        "evenness": _by_head(entropy / support.log().clamp(min=1e-300), rows),
        "sink": A[..., 0].masked_fill(~rows, 0).sum((0, 2)).div(rows.sum((0, 2)).clamp(min=1)).tolist(),
        "largest": _by_head(A.amax(-1), rows),
    }
    X = tokens_of(call, projections, "k")
    if X is None:
        return {**found, "why": UNSEEN if call.place is None else f"The input tokens of {call.place} were not seen."}
    return {**found, **sizes(A, X)}


UNSEEN = "No block of queries is known for this call, so its input tokens were not seen."


def _by_head(x: Tensor, rows: Tensor) -> list[float]:
    """The mean over samples and query tokens, for each head."""
    found: list[float] = (x.where(rows, 0).sum((0, 2)) / rows.sum((0, 2)).clamp(min=1)).tolist()
    return found


def seen(problem: Problem) -> Mapping[str, Any]:
    """Each call of attention in the first piece of the data, in the order of the forward pass."""
    evaluation = problem._evaluation
    calls: list[dict[str, Any]] = []

    def action() -> int:
        projections = Projections(problem.blocks, parameters(problem))
        watch = Watch(projections, lambda call: calls.append(described(call, projections)))
        within([watch], lambda: problem.loss_function.outputs(problem.model, piece.batch))
        return watch.skipped

    with torch.no_grad(), evaluation.isolated():
        pieces = evaluation.pieces()
        piece = next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        skipped = evaluation.at(None, action)
    return {"calls": calls, "skipped": skipped, "samples": piece.size}


def parameters(problem: Problem) -> dict[str, Tensor]:
    """The parameters that the model holds now, under all their names."""
    return dict(problem.model.named_parameters(remove_duplicate=False))
