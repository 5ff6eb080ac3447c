"""What attention looks at: entropy, sinks and moments of every head, from one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlens.problem import Problem
from curvlens.sdpa.mode import INSIDE
from curvlens.surroundings import within

LARGEST = 1 << 28
"""Numbers of one matrix of attention weights, over all samples and heads; larger ones are not looked at."""


class Watch(TorchFunctionMode):
    """Looks at all attention weights: those of fused kernels are computed beside them, those of a softmax are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[dict[str, Any]] = []
        self.skipped = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._fused(*args, **kwargs)
            return func(*args, **kwargs)
        if func in INSIDE:
            return within([self], lambda: INSIDE[func](*args, **kwargs))
        result = func(*args, **kwargs)
        if func in (torch.softmax, F.softmax, Tensor.softmax) and isinstance(result, Tensor) and result.ndim == 4:
            self._see(result, None)
        return result

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
        if query.ndim != 4 or query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] > LARGEST:
            self.skipped += 1
            return
        q, k = query.detach().float(), key.detach().float()
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            scores = (
                scores.masked_fill(~attn_mask, -math.inf)
                if attn_mask.dtype == torch.bool
                else scores + attn_mask.float()
            )
        weights = scores.softmax(-1)
        v = value.detach().float()
        self._see(weights, v if v.shape[1] == q.shape[1] else v.repeat_interleave(q.shape[1] // v.shape[1], 1))

    def _see(self, weights: Tensor, value: Tensor | None) -> None:
        if weights.numel() > LARGEST:
            self.skipped += 1
            return
        A = weights.detach().double().nan_to_num()
        support = (A > 0).sum(-1).clamp(min=1).double()
        entropy = -(A * A.clamp(min=1e-300).log()).sum(-1)
        rows = support > 1  # a token that sees itself alone has no choice
        layer = {
            "entropy": _by_head(entropy, rows),
            "evenness": _by_head(entropy / support.log().clamp(min=1e-300), rows),
            "sink": A[..., 0].masked_fill(~rows, 0).sum((0, 2)).div(rows.sum((0, 2)).clamp(min=1)).tolist(),
            "largest": _by_head(A.amax(-1), rows),
        }
        if value is not None and value.shape[:2] == A.shape[:2]:
            layer |= _moments(A, value.double())
        self.layers.append(layer)


def _by_head(x: Tensor, rows: Tensor) -> list[float]:
    """The mean over samples and query tokens, for each head."""
    found: list[float] = (x.where(rows, 0).sum((0, 2)) / rows.sum((0, 2)).clamp(min=1)).tolist()
    return found


def _moments(A: Tensor, v: Tensor) -> dict[str, Any]:
    """Root mean squares of the first three central moments of the values under the attention weights, by head."""
    m = A @ v
    second = (A @ v.square() - m.square()).clamp(min=0)  # the diagonal of M2
    third = A @ v**3 - 3 * m * (A @ v.square()) + 2 * m**3  # the diagonal of M3
    sizes = {"m1": m, "m2": second, "m3": third}
    return {name: x.square().mean((0, 2, 3)).sqrt().tolist() for name, x in sizes.items()}


def seen(problem: Problem) -> Mapping[str, Any]:
    """Each call of attention in the first piece of the data, in the order of the forward pass."""
    evaluation, watch = problem._evaluation, Watch()
    with torch.no_grad(), evaluation.isolated():
        pieces = evaluation.pieces()
        piece = next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        evaluation.at(None, lambda: within([watch], lambda: problem.loss_function.outputs(problem.model, piece.batch)))
    return {"calls": watch.layers, "skipped": watch.skipped, "samples": piece.size}
