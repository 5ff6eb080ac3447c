"""The model of the papers' experiments, as plain tensors: one Transformer block that adds numbers of five digits.

Tokens and positions are embedded with standard deviation σ; causal attention with one head, W_V and W_O; skip; a ReLU
MLP of width 4 d; skip; an unembedding of its own; no biases; all weights N(0, 0.64/d). The loss is the cross-entropy of
the six digits of the answer, over 64 sequences. Pre-LN has norms before attention, before the MLP and before the
unembedding.

Attention's Hessian is exact, in closed form: what lies behind attention enters by its gradient and its second
derivative at every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvlens.calculus import attention, norms
from curvlens.calculus.attention import AttentionHessian, Root
from curvlens.data import Addition
from curvlens.papers.draws import Draws

EPS = 1e-5
"""Of the norms."""
SEQUENCES = 64
Kind = Literal["softmax", "linear"]
Norm = Literal["none", "pre"]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, inputs first."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """One layer and the tables around it."""

    embed: Tensor
    pos: Tensor
    layer: Layer
    unembed: Tensor


def drawn(draw: Draws, width: int) -> Layer:
    """A layer's weights, N(0, 0.64/d)."""
    scale = 0.8 / math.sqrt(width)
    q, k, v, o = (draw(width, width, scale=scale) for _ in range(4))
    return Layer(q, k, v, o, draw(width, 4 * width, scale=scale), draw(4 * width, width, scale=scale))


def weights(width: int, *, sigma: float, seed: int, task: Addition) -> Weights:
    """Drawn from a seed; embeddings are σ times draws that do not depend on σ."""
    draw = Draws(seed)
    embed, pos = draw(task.vocab, width, scale=sigma), draw(task.context, width, scale=sigma)
    return Weights(embed, pos, drawn(draw, width), draw(width, task.vocab, scale=0.8 / math.sqrt(width)))


def block_hessian(
    width: int,
    *,
    sigma: float,
    seed: int,
    norm: Norm = "none",
    kind: Kind = "softmax",
    temperature: float = 1.0,
    sequences: int = SEQUENCES,
) -> AttentionHessian:
    """The Hessian of the loss by W_Q, W_K, W_V and W_O (blocks Q, K, V, O), at weights and data drawn from a seed."""
    task = Addition()
    w = weights(width, sigma=sigma, seed=seed, task=task)
    return hessian_at(w, *task.batch(sequences, seed=seed), norm=norm, kind=kind, temperature=temperature)


def hessian_at(
    w: Weights, ids: Tensor, labels: Tensor, *, norm: Norm = "none", kind: Kind = "softmax", temperature: float = 1.0
) -> AttentionHessian:
    """The same at given weights, for given tokens and labels (B, L), which count at the same places of all sequences.

    Those below 0 do not count.
    """
    q, k, value = w.layer.q, w.layer.k, (w.layer.v, w.layer.o)
    first = int((labels[0] >= 0).nonzero()[0])  # no loss before the answer: those tokens are keys and values only
    x = w.embed[ids] + w.pos
    tokens = norms.forward(x, eps=EPS) if norm == "pre" else x
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[first:]
    options = {"context": tokens, "mask": seen, "kind": kind, "temperature": temperature}
    out = attention.forward(tokens[:, first:], q, k, value, **options)  # type: ignore[arg-type]
    grad, root, rest = _behind(x[:, first:] + out, labels[:, first:], w, norm)
    return attention.hessian(
        tokens[:, first:],
        q,
        k,
        value,
        grad=grad,
        curvature=Root(root) if rest is None else (Root(root), rest),
        **options,  # type: ignore[arg-type]
    )


def cross_entropy(logits: Tensor, labels: Tensor, jacobian: Tensor) -> tuple[Tensor, Tensor]:
    """Of the labels that count: its derivative by the logits, e = s (p − y), and a root R of its Gauss–Newton matrix.

    s is a token's share in the loss of its sequence; R Rᵀ = J s (diag p − p pᵀ) Jᵀ with the logits' derivative J by
    what they are functions of, inputs first.
    """
    p = logits.softmax(-1)
    share = (labels >= 0).to(logits)[..., None]
    share = share / share.sum(1, keepdim=True)
    error = share * (p - torch.nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1]))
    return error, (jacobian - jacobian @ p[..., None]) * (share * p).sqrt()[..., None, :]


def _behind(y: Tensor, labels: Tensor, w: Weights, norm: Norm) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of the loss as a function of the states y (B, T, d) behind attention and its skip.

    Its gradient, a root R of its Gauss–Newton part R Rᵀ, and the rest of its second derivative (None where that is
    zero: without norms all is linear as long as no ReLU turns).
    """
    normed = norms.forward(y, eps=EPS) if norm == "pre" else y
    hidden = normed @ w.layer.up
    on = (hidden > 0)[..., None]
    state = y + hidden.relu() @ w.layer.down
    mlp = w.layer.up @ (on * w.layer.down)  # (B, T, d, d): the MLP's derivative, inputs first
    if norm == "none":
        logits = state @ w.unembed
        jacobian = w.unembed + mlp @ w.unembed
    else:
        before, last = norms.jacobian(y, eps=EPS), norms.jacobian(state, eps=EPS)  # symmetric
        logits = norms.forward(state, eps=EPS) @ w.unembed
        inner = torch.eye(y.shape[-1], dtype=y.dtype) + before @ mlp  # ∂state/∂y, inputs first
        jacobian = inner @ last @ w.unembed
    error, root = cross_entropy(logits, labels, jacobian)
    grad = (jacobian @ error[..., None]).squeeze(-1)
    if norm == "none":
        return grad, root, None
    pulled = error @ w.unembed.mT  # at the output of the last norm
    at_state = (last @ pulled[..., None]).squeeze(-1)
    at_normed = (mlp @ at_state[..., None]).squeeze(-1)
    rest = inner @ norms.contracted(state, pulled, eps=EPS) @ inner.mT + norms.contracted(y, at_normed, eps=EPS)
    return grad, root, rest
