"""Products of the Hessian with vectors along the tokens.

A product costs about N L_k (12 d_K + 10 d_out) operations. It needs no moments, and includes derivatives by the tokens
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.curvature import applied
from curvlens.calculus.form import SplitPart
from curvlens.calculus.output_loss import OutputLoss
from curvlens.calculus.softmax import gradient_rows

Directions = Mapping[str, Tensor]
"""By letter: (k, H, ·, ·) for the weights Q, K, V, O; (k, B, ·, ·) for the tokens X, C. A missing letter is zero."""


class Tangent(NamedTuple):
    """Tangents of the layer's intermediate values, (k, H, B, …): of q, k, v if they vary, of A and of the output."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    value: Tensor | None
    """The tangent of W_V, (k, H, d, d_out)."""
    attention: Tensor
    output: Tensor
    """(k, B, L, d_out)."""


def push(layer: AttentionInputs, v: Directions) -> Tangent:
    """J v for k directions of the weights and tokens at once."""
    queries, keys = layer.queries, layer.keys
    q, k, values = _projected(layer)
    xd = v.get("X")
    cd = v.get("C") if layer.crossed else xd
    qd = _plus(
        queries @ v["Q"][:, :, None] if "Q" in v else None, None if xd is None else xd[:, None] @ layer.WQ[:, None]
    )
    kd = layer.centred @ v["K"][:, :, None] if "K" in v else None
    if cd is not None:
        wide = cd[:, None].expand(-1, layer.heads, -1, -1, -1)
        kd = _plus(kd, wide if layer.WK is None else wide @ layer.WK[:, None])
    value = _low_rank_direction(layer.down, layer.up, v)
    vd = _plus(
        None if value is None else keys @ value[:, :, None], None if cd is None else cd[:, None] @ layer.WV[:, None]
    )
    td = _plus(None if qd is None else qd @ k.mT, None if kd is None else q @ kd.mT)
    count = next(iter(v.values())).shape[0]
    if td is None:
        ad = torch.zeros((count, *layer.attention.shape), dtype=q.dtype, device=q.device)
    else:
        ad = _through(layer, layer.tau * td)
    fd = ad @ values if vd is None else ad @ values + layer.attention @ vd
    return Tangent(qd, kd, vd, value, ad, fd.sum(1))


def pull(layer: AttentionInputs, g: Float[Tensor, "b l o"]) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b m e"]]:
    """Jᵀ g with respect to the tokens: the gradients by X_q and X_k, (B, L, d) and (B, L_k, d)."""
    q, k, values = _projected(layer)
    w = _through(layer, g @ values.mT)
    by_key = layer.tau * (w.mT @ q)
    to_keys = (by_key if layer.WK is None else by_key @ layer.WK[:, None].mT) + (layer.attention.mT @ g) @ layer.WV[
        :, None
    ].mT
    return (layer.tau * (w @ k) @ layer.WQ[:, None].mT).sum(0), to_keys.sum(0)


def along_tokens(layer: AttentionInputs, loss: OutputLoss, v: Directions, part: SplitPart) -> dict[str, Tensor]:
    """H v with respect to the weights and the tokens (X, and C for the context), for k directions at once."""
    functional = part != "outer"
    tau, attention, g = layer.tau, layer.attention, loss.gradient
    q, k, values = _projected(layer)
    tangent = push(layer, v)
    qd, kd, vd, ad = tangent.q, tangent.k, tangent.v, tangent.attention
    fd = tangent.output
    gd = {
        "outer": lambda: applied(loss.outer, fd),
        "functional": lambda: applied(loss.rest, fd),
        "total": lambda: _plus(applied(loss.outer, fd), applied(loss.rest, fd)),
    }[part]()
    # the adjoint of T, and the tangents of the adjoints of T, q, k and v
    scores = g @ values.mT
    w = _through(layer, scores)
    wd = torch.zeros_like(ad) if gd is None else _through(layer, gd[:, None] @ values.mT)
    if functional:
        if vd is not None:
            wd = wd + _through(layer, g @ vd.mT)
        if layer.kind == "softmax":
            s = scores - scores.gather(-1, attention.argmax(-1, keepdim=True))  # avoids cancellation in one-hot rows
            centred = s - (attention * s).sum(-1, keepdim=True)
            wd = wd + ad * centred - attention * (ad * s).sum(-1, keepdim=True)
    dq, dk = tau * (wd @ k), tau * (wd.mT @ q)
    dv = torch.zeros_like(values).expand(ad.shape[0], *values.shape)
    if gd is not None:
        dv = attention.mT @ gd[:, None]
    if functional:
        dq = dq if kd is None else dq + tau * (w @ kd)
        dk = dk if qd is None else dk + tau * (w.mT @ qd)
        dv = dv + ad.mT @ g
    bars = (tau * (w @ k), tau * (w.mT @ q), attention.mT @ g) if functional else None
    return _to_weights_and_tokens(layer, v, tangent.value, (dq, dk, dv), bars)


def _to_weights_and_tokens(
    layer: AttentionInputs,
    v: Directions,
    value: Tensor | None,
    changes: tuple[Tensor, Tensor, Tensor],
    bars: tuple[Tensor, Tensor, Tensor] | None,
) -> dict[str, Tensor]:
    """From the adjoints of q = X W_Q, k and v (``bars``, for the functional part) and their tangents to W̄ and X̄."""
    queries, keys = layer.queries, layer.keys
    dq, dk, dv = changes
    result: dict[str, Tensor] = {"Q": (queries.mT @ dq).sum(2)}
    if layer.WK is not None:
        result["K"] = (layer.centred.mT @ dk).sum(2)
    total = (keys.mT @ dv).sum(2)
    to_x = dq @ layer.WQ[:, None].mT
    to_c = (dk if layer.WK is None else dk @ layer.WK[:, None].mT) + dv @ layer.WV[:, None].mT
    gradient = None
    if bars is not None:
        q_bar, k_bar, v_bar = bars
        xd = v.get("X")
        cd = v.get("C") if layer.crossed else xd
        if xd is not None:
            result["Q"] = result["Q"] + (xd[:, None].mT @ q_bar).sum(2)
        if cd is not None:
            total = total + (cd[:, None].mT @ v_bar).sum(2)
            if layer.WK is not None:
                result["K"] = result["K"] + (cd[:, None].mT @ k_bar).sum(2)
        if "Q" in v:
            to_x = to_x + q_bar @ v["Q"][:, :, None].mT
        if "K" in v:
            to_c = to_c + k_bar @ v["K"][:, :, None].mT
        if value is not None:
            to_c = to_c + v_bar @ value[:, :, None].mT
        gradient = (keys.mT @ v_bar).sum(1) if layer.up is not None else None
    result |= _low_rank_result(layer.down, layer.up, total, gradient, v)
    to_x, to_c = to_x.sum(1), to_c.sum(1)
    return result | ({"X": to_x, "C": to_c} if layer.crossed else {"X": to_x + to_c})


def _projected(layer: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (H, B, ·, ·). k and v are of centred keys, because only differences of keys matter here."""
    x = layer.centred
    k = x.expand(layer.heads, -1, -1, -1) if layer.WK is None else x @ layer.WK[:, None]
    return layer.q.view(-1, *layer.queries.shape[:2], layer.q.shape[-1]), k, x @ layer.WV[:, None]


def _through(layer: AttentionInputs, rows: Tensor) -> Tensor:
    """∂A/∂T applied to every row."""
    if layer.kind == "softmax":
        return gradient_rows(layer.attention.expand(rows.shape), rows)
    return rows if layer.allowed is None else rows * layer.allowed


def _plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _low_rank_direction(down: Tensor, up: Tensor | None, v: Directions) -> Tensor | None:
    """The tangent of W_V, (…, d, d_out): V̇, or V̇ O + V Ȯ."""
    if up is None:
        return v.get("V")
    return _plus(v["V"] @ up if "V" in v else None, down @ v["O"] if "O" in v else None)


def _low_rank_result(
    down: Tensor, up: Tensor | None, total: Tensor, gradient: Tensor | None, v: Directions
) -> dict[str, Tensor]:
    """From the tangent of the gradient by W_V to those by its factors."""
    if up is None:
        return {"V": total}
    to_down, to_up = total @ up.mT, down.mT @ total
    if gradient is not None:
        to_down = to_down + gradient @ v["O"].mT if "O" in v else to_down
        to_up = to_up + v["V"].mT @ gradient if "V" in v else to_up
    return {"V": to_down, "O": to_up}
