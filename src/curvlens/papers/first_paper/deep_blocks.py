"""What Figure 6 measures: the attention blocks of every layer of a deep Transformer without norms, exact and dense.

Layer by layer from the top, the loss as a function of a layer's states X has a gradient and a second derivative S = S_o
+ S_f over all tokens of a sequence; through attention with its skip, y = x + f(x), and through the MLP, which is linear
where no ReLU turns,

    S_y = Mᵀ S M,    S_x = (I + ∂f/∂x)ᵀ S_y (I + ∂f/∂x) + g_y · ∂²f/∂x² (the last in the functional part),

and the block of a weight W that acts as u = Z W is

    H_W = Σ_sequences Σ_jk z_j z_kᵀ ⊗ (∂f/∂u_jᵀ S_y ∂f/∂u_k) + (g_y · ∂²f/∂W²).

The outer part has S_o = R Rᵀ with as many columns as logits behind the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.setting import Layer, cross_entropy

AT_ONCE = 8
"""Sequences that go through together: their matrices of all pairs of tokens stay in the cache."""


@dataclass(frozen=True)
class Behind:
    """The loss of each sequence as a function of states (B, L, d): gradient, root of S_o, and S_f."""

    grad: Tensor
    """(B, L, d)."""
    root: Tensor
    """(B, L, d, columns)."""
    rest: Tensor | None
    """(B, L, d, L, d); None where it is zero."""

    def through(self, step: Tensor) -> Behind:
        """As a function of what a map of each token (B, L, d, d), inputs first, is applied to."""
        grad = (step @ self.grad[..., None]).squeeze(-1)
        if self.rest is None:
            return Behind(grad, step @ self.root, None)
        rest = torch.einsum("biac,bicjd->biajd", step, self.rest)
        return Behind(grad, step @ self.root, torch.einsum("bjed,biajd->biaje", step, rest))


@dataclass(frozen=True)
class Attended:
    """Attention at some states, and its derivatives."""

    x: Tensor
    layer: Layer
    a: Tensor
    """A, (B, L, L)."""
    q: Tensor
    """Queries over √d."""
    pulled: Tensor
    """A_ij (v_j W_O − f_i), (B, L, L, d): what score (i, j) does to f_i."""
    by_query: Tensor
    """∂f_i/∂q_i, (B, L, d_K, d)."""
    out: Tensor
    """f."""


def attended(x: Tensor, layer: Layer) -> Attended:
    """One causal head."""
    scale = 1 / math.sqrt(layer.q.shape[1])
    q, k, v = x @ layer.q * scale, x @ layer.k, x @ layer.v @ layer.o
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    a = (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    out = a @ v
    pulled = a[..., None] * (v[:, None] - out[:, :, None])
    by_query = scale * torch.einsum("bjk,bijc->bikc", k, pulled)
    return Attended(x, layer, a, q, pulled, by_query, out)


def mlp_step(y: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """y + φ(y W_up) W_down, and its derivative at every token, inputs first."""
    hidden = y @ layer.up
    step = layer.up @ ((hidden > 0)[..., None] * layer.down) + torch.eye(y.shape[-1], dtype=y.dtype)
    return y + hidden.relu() @ layer.down, step


def blocks(at: Attended, behind: Behind) -> dict[str, tuple[Tensor, Tensor]]:
    """H_o and H_f of each weight, (d², d²), summed over the sequences; ``behind`` is that of y = x + f."""
    layer, heads = at.layer, {}
    mixed = at.a @ at.x @ layer.v  # what W_O is applied to
    own = attention.hessian(
        at.x, layer.q, layer.k, (layer.v, layer.o), grad=behind.grad, curvature=0.0, mask="causal", reduction="sum"
    ).functional
    for letter, inputs in (("Q", at.x), ("K", at.x), ("V", at.x), ("O", mixed)):
        root, rest = pulled(at, behind, letter)
        rows = torch.einsum("bja,bjkr->akbr", inputs, root).flatten(2).flatten(0, 1)
        outer = rows @ rows.mT
        heads[letter] = (outer, own[letter] if rest is None else own[letter] + _summed(inputs, rest))
    return heads


def _summed(z: Tensor, rest: Tensor) -> Tensor:
    """Σ_sequences Σ_jk z_j z_kᵀ ⊗ E_jk of a symmetric E (B, L, d', L, d'): half of the pairs, and their transpose."""
    j, k = torch.tril_indices(z.shape[1], z.shape[1])
    weight = torch.where(j == k, 0.5, 1.0).to(z)[:, None, None]
    pairs = (weight * z[:, j, :, None] * z[:, k, None, :]).reshape(-1, z.shape[2] ** 2)
    of_pairs = rest[:, j, :, k].transpose(0, 1)
    half = (pairs.mT @ of_pairs.reshape(len(pairs), -1)).view(*2 * z.shape[2:], *of_pairs.shape[2:])
    matrix = half.permute(0, 2, 1, 3).reshape(z.shape[2] * of_pairs.shape[2], -1)
    return matrix + matrix.mT


def pulled(at: Attended, behind: Behind, letter: str) -> tuple[Tensor, Tensor | None]:
    """The root and the rest of S_y, as of queries, keys, values or W_O's outputs u: ∂f/∂uᵀ S_y ∂f/∂u."""
    root, rest = behind.root, behind.rest
    if letter == "Q":
        through = behind.through(at.by_query)
        return through.root, through.rest
    if letter == "K":
        root = torch.einsum("bik,bijr->bjkr", at.q, at.pulled @ root)
        if rest is not None:
            half = torch.einsum("bijc,bicud->bijud", at.pulled, rest)
            scores = torch.einsum("bijud,buvd->bijuv", half, at.pulled)
            rest = torch.einsum("bjkuv,bul->bjkvl", torch.einsum("bik,bijuv->bjkuv", at.q, scores), at.q)
    if letter == "V":
        root = torch.einsum("bij,bikr->bjkr", at.a, at.layer.o @ root)
        if rest is not None:
            through = behind.through(at.layer.o.expand(*at.x.shape[:2], -1, -1))
            rest = torch.einsum("bij,bikul->bjkul", at.a, through.rest)
            rest = torch.einsum("bjkul,buv->bjkvl", rest, at.a)
    return root, rest


def before(at: Attended, behind: Behind) -> Behind:
    """The loss as a function of the layer's states x, from that of y = x + f(x)."""
    layer, (batch, length, d) = at.layer, at.x.shape
    jacobian = torch.einsum("bijc,bia->biajc", at.pulled, at.q @ layer.k.mT).permute(0, 1, 4, 3, 2)  # (i, c, j, a)
    jacobian = jacobian + torch.einsum("bij,ac->bicja", at.a, layer.v @ layer.o)
    each = torch.arange(length)
    jacobian[:, each, :, each] += (layer.q @ at.by_query).mT.transpose(0, 1)
    jacobian[:, each, :, each] += torch.eye(d, dtype=at.x.dtype)
    flat = jacobian.reshape(batch, length * d, length * d)
    rest = by_tokens(at, behind.grad)
    if behind.rest is not None:
        rest += flat.mT @ behind.rest.reshape(batch, length * d, -1) @ flat
    return Behind(
        (flat.mT @ behind.grad.reshape(batch, -1, 1)).view(batch, length, d),
        (flat.mT @ behind.root.reshape(batch, length * d, -1)).view(batch, length, d, -1),
        rest.view(batch, length, d, length, d),
    )


def by_tokens(at: Attended, grad: Tensor) -> Tensor:
    """g · ∂²f/∂x² of each sequence, (B, L·d, L·d).

    With scores T, w = ∂(g·f)/∂T and s_ij = g_i · (v_j W_O) it is a sum over the rows i of A, and its transpose:

        ∂Tᵀ (½ (diag w − a wᵀ − w aᵀ) ∂T + (diag a − a aᵀ) ∂s),    and w_ij ∂²T_ij from T being a product.
    """
    layer, (batch, length, d) = at.layer, at.x.shape
    each, scale = torch.arange(length), 1 / math.sqrt(layer.q.shape[1])
    by_score = torch.einsum("bijc,bic->bij", at.pulled, grad)  # w
    scores, values = (at.x.new_zeros(batch, length, length, length, d) for _ in range(2))  # by x_m: (b, i, j, m, c)
    scores[:, each, :, each] += scale * (at.x @ layer.k @ layer.q.mT)
    scores[:, :, each, each] += (at.q @ layer.k.mT)[:, :, None]
    values[:, :, each, each] += (grad @ (layer.v @ layer.o).mT)[:, :, None]
    scores, values = scores.flatten(3), values.flatten(3)
    rows = (batch, length, 1, length)
    a, w = at.a.view(rows), by_score.view(rows)
    mean, slope = a @ scores, w @ scores
    inner = 0.5 * (w.mT * (scores - mean) - a.mT * slope) + a.mT * (values - a @ values)
    half = scores.flatten(1, 2).mT @ inner.flatten(1, 2)
    products = torch.einsum("bij,ac->biajc", scale * by_score, layer.q @ layer.k.mT)
    half += products.reshape(half.shape)
    return half + half.mT


def layer_norms(x: Tensor, labels: Tensor, layers: Sequence[Layer], unembed: Tensor) -> list[dict[str, list[float]]]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of every weight of every layer, for the cross-entropy of the labels that count."""
    found: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in layers]
    for states, wanted in zip(x.split(AT_ONCE), labels.split(AT_ONCE), strict=True):  # type: ignore[no-untyped-call]
        for sums, own in zip(found, _layer_blocks(states, wanted, layers, unembed), strict=True):
            for letter, parts in own.items():
                for total, part in zip(sums.setdefault(letter, parts), parts, strict=True):
                    if total is not part:
                        total += part
    return [
        {
            letter: [float(part.norm()) / len(x) for part in (outer, functional, outer + functional)]
            for letter, (outer, functional) in each.items()
        }
        for each in found
    ]


def _layer_blocks(
    x: Tensor, labels: Tensor, layers: Sequence[Layer], unembed: Tensor
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """H_o and H_f of every weight of every layer, summed over sequences."""
    passes, states = [], x
    for layer in layers:
        at = attended(states, layer)
        states, step = mlp_step(states + at.out, layer)
        passes.append((at, step))
    behind = _loss(states @ unembed, labels, unembed)
    found = []
    for number, (at, step) in reversed(list(enumerate(passes))):
        behind = behind.through(step)
        found.append(blocks(at, behind))
        if number:
            behind = before(at, behind)
    return found[::-1]


def _loss(logits: Tensor, labels: Tensor, unembed: Tensor) -> Behind:
    """Of the states before the unembedding."""
    batch, length, classes = logits.shape
    d = unembed.shape[0]
    error, token = cross_entropy(logits, labels, unembed)  # the root of each token: (B, L, d, classes)
    counted = (labels[0] >= 0).nonzero()[:, 0].tolist()
    root = logits.new_zeros(batch, length, d, len(counted), classes)
    for column, place in enumerate(counted):
        root[:, place, :, column] = token[:, place]
    return Behind(error @ unembed.mT, root.flatten(3), None)
