"""Bounds on the derivatives of attention with H heads: heads side by side, followed by W_O."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens.calculus.attention.inputs import AttentionInputs
from curvlens.calculus.bounds.of_attention import SOFTMAX, SOFTMAX_SECOND
from curvlens.calculus.bounds.one_head import Bent, Head
from curvlens.calculus.bounds.sizes import Local, Pairs, Sizes, spectral
from curvlens.calculus.moments import contracted, deviations
from curvlens.calculus.room import require_room
from curvlens.calculus.softmax import gradient_rows


def prior(x: Sizes, length: int, of: AttentionInputs) -> Local[Sizes]:
    """From norms of weights and sizes of tokens; the tokens need not be those of the layer."""
    root, heads = math.sqrt(length), []
    varied = min(SOFTMAX * x.spectral**2, x.row**2)  # ‖M2_i‖, the covariance of tokens
    for wq, wk, wv in zip(*((spectral(w) for w in ws) for ws in (of.WQ, _given(of.WK), of.down)), strict=True):
        bx = min(SOFTMAX * x.spectral, x.row)
        heads.append(
            Head(
                tau=of.tau,
                x=x.spectral,
                q=x.spectral * wq,
                wq=wq,
                wk=wk,
                wv=wv,
                a=root,
                ax=root * x.row,
                b=SOFTMAX,
                bx=bx,
                bk=bx * wk,
                vb=bx * wv,
                xbx=varied,
                xbk=varied * wk,
                vbx=varied * wv,
                vbk=varied * wv * wk,
            )
        )

    def bent(head: Head, grad: Sizes) -> Bent:
        b3 = SOFTMAX_SECOND * x.spectral * head.wv * grad.row
        third = min(b3 * x.spectral**2, 2 * x.row * head.wv * grad.row * varied)
        w, wx = SOFTMAX * x.spectral * head.wv * grad.total, varied * head.wv * grad.total
        return Bent(
            lam=grad.spectral,
            b3=b3,
            b3x=b3 * x.spectral,
            kb3=b3 * x.spectral * head.wk,
            xb3x=third,
            kb3x=third * head.wk,
            kb3k=third * head.wk**2,
            w=w,
            wx=wx,
            xw=x.spectral * w,
            xwx=x.spectral * wx,
            at_q=head.tau * wx * head.wk,
            at_k=head.tau * w * head.q,
            at_v=root * grad.spectral,
        )

    out, single = _out(of), [spectral(o) for o in _split(_out(of), of.heads)]
    row = x.row * math.hypot(*(head.wv for head in heads))
    first = _first(heads, spectral(out), root * row)

    def bend(grad: Sizes) -> Pairs:
        parts = [
            bent(head, Sizes(grad.total * o, grad.spectral * o, grad.row * o, grad.total * o)).second(head)
            for head, o in zip(heads, single, strict=True)
        ]
        return _second(parts, heads, grad.spectral)

    output = Sizes.at_most(root * row * spectral(out), row * spectral(out))
    return Local(output, first, bend, lambda g: Sizes.at_most(first["X"] * g.total))


def known(of: AttentionInputs) -> Local[Tensor]:
    """From the attention moments of one sample's tokens."""
    x, keys, out = of.queries[0], _given(of.WK), _out(of)
    size = spectral(x)
    numbers = (of.heads + 4) * len(x) ** 2 * x.shape[1]
    require_room(numbers, x, "A bound from the data", "Give data=False, or fewer tokens.")
    each = list(zip(of.attention[:, 0], of.q, of.WQ, keys, of.down, strict=True))
    heads, sides = [], []
    for a, q, wq, wk, wv in each:
        second = contracted(a, x, torch.zeros_like(x)).second
        from_mean = deviations(a, x)
        bx = a[..., None] * from_mean
        sides.append(from_mean)
        heads.append(
            Head(
                tau=of.tau,
                x=size,
                q=spectral(q),
                wq=spectral(wq),
                wk=spectral(wk),
                wv=spectral(wv),
                a=spectral(a),
                ax=spectral(a @ x),
                b=float((2 * a * (1 - a)).max()),  # the largest row sum of |B|
                bx=spectral(bx),
                bk=spectral(bx @ wk),
                vb=spectral(bx @ wv),
                xbx=spectral(second),
                xbk=spectral(second @ wk),
                vbx=spectral(wv.mT @ second),
                vbk=spectral(wv.mT @ second @ wk),
            )
        )
    mixed = torch.cat([a @ x @ wv for a, _, _, _, wv in each], 1)

    def gradients(grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """λ at the output of every head, and w."""
        split = _split(out, of.heads)
        at = [grad @ o.mT for o in split]
        return [(g, gradient_rows(a, g @ (x @ wv).mT)) for g, (a, _, _, _, wv) in zip(at, each, strict=True)]

    def bend(grad: Tensor) -> Pairs:
        parts = []
        for head, from_mean, (g, w), (a, q, _, wk, wv) in zip(heads, sides, gradients(grad), each, strict=True):
            found = contracted(a, x, g @ wv.mT)
            b3x = w[..., None] * from_mean - a[..., None] * found.first_order[:, None, :]
            sums = w.abs().sum(-1, keepdim=True) - w.abs()
            b3 = w.abs() * ((1 - 2 * a).abs() + 1 - a) + a * sums  # a bound on the row sums of |B3|
            bent = Bent(
                lam=spectral(g),
                b3=min(float(b3.max()), SOFTMAX_SECOND * float((g @ (x @ wv).mT).norm(dim=1).max())),
                b3x=spectral(b3x),
                kb3=spectral(b3x @ wk),
                xb3x=spectral(found.third),
                kb3x=spectral(wk.mT @ found.third),
                kb3k=spectral(wk.mT @ found.third @ wk),
                w=spectral(w),
                wx=spectral(found.first_order),
                xw=spectral(x.mT @ w),
                xwx=spectral(x.mT @ found.first_order),
                at_q=head.tau * spectral(found.first_order @ wk),
                at_k=head.tau * spectral(w.mT @ q),
                at_v=spectral(a.mT @ g),
            )
            parts.append(bent.second(head))
        return _second(parts, heads, spectral(grad))

    def back(grad: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for (g, w), (a, q, wq, wk, wv) in zip(gradients(grad), each, strict=True):
            total += of.tau * (w @ (x @ wk) @ wq.mT + w.mT @ q @ wk.mT) + a.mT @ g @ wv.mT
        return total

    return Local(of.output[0], _first(heads, spectral(out), spectral(mixed)), bend, back)


# Heads side by side: a quantity of single heads is bounded by the largest head, a shared one by the sum.


def _first(heads: Sequence[Head], out: float, mixed: float) -> dict[str, float]:
    parts = [head.first() for head in heads]
    own = {name: out * max(part[name] for part in parts) for name in "QKV"}
    return {"X": out * math.hypot(*(part["X"] for part in parts)), **own, "O": mixed}


def _second(parts: Sequence[dict[tuple[str, str], float]], heads: Sequence[Head], grad: float) -> Pairs:
    inside = _first(heads, 1.0, 0.0)
    found = {("O", name): grad * inside[name] for name in ("X", *"QKV")}
    for pair in parts[0]:
        values = [part[pair] for part in parts]
        shared = pair.count("X")
        found[pair] = max(values) if not shared else math.hypot(*values) if shared == 1 else sum(values)
    return found


def _out(of: AttentionInputs) -> Tensor:
    """W_O of all heads, (H d_V, d_out); identities if the values are the output."""
    if of.up is None:
        return torch.eye(of.d_out, dtype=of.down.dtype, device=of.down.device).repeat(of.heads, 1)
    return of.up.flatten(0, 1)


def _split(out: Tensor, heads: int) -> Sequence[Tensor]:
    return out.view(heads, -1, out.shape[1]).unbind()


def _given(keys: Tensor | None) -> Tensor:
    assert keys is not None
    return keys
