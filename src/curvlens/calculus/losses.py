"""Second derivatives of the losses with respect to the outputs, in closed form and row by row.

Cross-entropy in all its forms (classes, soft targets, class weights, label smoothing, ignored tokens) is
ℓ = −Σ_c q_c log p_c with p = softmax(z) and a target q ≥ 0 of mass s = Σ_c q_c. Hence (`docs/explanation/math.md`,
"Losses")

    ∂ℓ/∂z = s p − q,        ∂²ℓ/∂z² = s (diag p − p pᵀ) = s B Bᵀ,   B = diag(√p) − p √pᵀ.

The Hessian depends on the target only through its mass s. Rows are processed in chunks: besides logits, argument and
result, nothing of the size of the logits is held. This makes a vocabulary of 50 000 affordable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError, a_kind

CHUNK = 1 << 20
"""Numbers in one chunk of rows: 8 MB in float64, inside the cache of most processors."""


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(classes, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _softmax(logits: Tensor) -> Tensor:
    """Probabilities, in float32 or higher precision."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def cross_entropy_curvature(
    logits: Float[Tensor, "n c"], mass: Float[Tensor, " n"], t: Float[Tensor, "n c"]
) -> Float[Tensor, "n c"]:
    """Apply the Hessian of every row's cross-entropy: s (p∘t − p ⟨p, t⟩)."""
    out = torch.empty_like(t)
    for chunk in _chunks(*logits.shape):
        p = _softmax(logits[chunk])
        part = p * t[chunk]
        out[chunk] = part.addcmul_(p, part.sum(-1, keepdim=True), value=-1).mul_(mass[chunk, None])
    return out


def cross_entropy_sqrt_curvature(
    logits: Float[Tensor, "n c"], mass: Float[Tensor, " n"], z: Float[Tensor, "n c"]
) -> Float[Tensor, "n c"]:
    """Apply √s B = √s (diag √p − p √pᵀ), a square root of the Hessian: B Bᵀ = diag p − p pᵀ."""
    out = torch.empty_like(z)
    for chunk in _chunks(*logits.shape):
        p = _softmax(logits[chunk])
        part = p.sqrt().mul_(z[chunk])
        part.addcmul_(p, part.sum(-1, keepdim=True), value=-1)
        torch.mul(part, mass[chunk, None].sqrt(), out=out[chunk])
    return out


def cross_entropy_sample(
    logits: Float[Tensor, "n c"], mass: Float[Tensor, " n"], uniform: Float[Tensor, " n"]
) -> Float[Tensor, "n c"]:
    """√s (p − e_y) with a class y drawn from p by inversion of ``uniform``: mean 0, covariance s (diag p − p pᵀ)."""
    out = torch.empty_like(logits)
    last = logits.shape[-1] - 1
    for chunk in _chunks(*logits.shape):
        p = _softmax(logits[chunk])
        drawn = torch.searchsorted(p.double().cumsum(-1), uniform[chunk, None].double(), right=True).clamp_(max=last)
        out[chunk] = p.scatter_add(-1, drawn, -torch.ones_like(drawn, dtype=p.dtype)) * mass[chunk, None].sqrt()
    return out


def square_curvature(t: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Apply the Hessian of ‖f − y‖²: 2 t."""
    return 2 * t


Over = Literal["sample", "all"]


def unembedded_cross_entropy(
    outputs: Float[Tensor, "*batch l d"],
    unembedding: Float[Tensor, "d c"],
    labels: Int[Tensor, "*batch l"],
    *,
    ignore_index: int = -100,
    over: Over = "sample",
) -> tuple[Float[Tensor, "*batch l d"], Float[Tensor, "*batch l d d"]]:
    """Gradient and curvature, at every token's output f, of the mean cross-entropy of the logits f E.

    g_i = n_i E (p_i − y_i) and S_i = n_i E (diag p_i − p_i p_iᵀ) Eᵀ; both are zero if the label is ignored. Give them
    to `curvlens.calculus.attention.hessian` as ``grad`` and ``curvature``; it takes the mean over the B samples.

    Args:
        outputs: F, one token in each row.
        unembedding: E, (d, classes).
        labels: A class for each token, or ``ignore_index``.
        ignore_index: The label of tokens that do not count.
        over: "sample": n_i = 1/(counted tokens of the sample), so every sample has the same weight; a sample without
            counted tokens adds nothing. "all": n_i = B/(counted tokens of all samples), so the mean over the samples
            is the mean over all counted tokens, as in ``F.cross_entropy``.
    """
    gradient, root = unembedded_cross_entropy_root(outputs, unembedding, labels, ignore_index=ignore_index, over=over)
    return gradient, root @ root.mT


def unembedded_cross_entropy_root(
    outputs: Float[Tensor, "*batch l d"],
    unembedding: Float[Tensor, "d c"],
    labels: Int[Tensor, "*batch l"],
    *,
    ignore_index: int = -100,
    over: Over = "sample",
) -> tuple[Float[Tensor, "*batch l d"], Float[Tensor, "*batch l d c"]]:
    """The same gradient, and a root R_i = √n_i E (diag √p_i − p_i √p_iᵀ) of the curvature, S_i = R_i R_iᵀ.

    Give it as ``curvature=attention.Root(R)``. With fewer classes than features S need not be built.
    """
    counted = _counted(outputs, unembedding, labels, ignore_index)
    if over not in ("sample", "all"):
        raise CurvlensError(f"over={over!r}, expected 'sample' or 'all'.")
    # no derivatives are needed, so no graph is built
    outputs, unembedding = outputs.detach(), unembedding.detach()
    p = _softmax(outputs @ unembedding)
    wide = unembedding.to(p.dtype)
    if over == "sample":
        share = counted.to(p.dtype) / counted.sum(-1, keepdim=True).clamp(min=1)
    else:
        share = counted.to(p.dtype) * (math.prod(labels.shape[:-1]) / int(counted.sum()))
    target = torch.zeros_like(p).scatter_(-1, labels.long().where(counted, 0)[..., None], 1.0)
    root = p.sqrt()[..., None, :] * (wide - wide @ p[..., None])
    gradient = share[..., None] * ((p - target) @ wide.mT)
    return gradient.to(outputs.dtype), (share.sqrt()[..., None, None] * root).to(outputs.dtype)


def _counted(outputs: Tensor, unembedding: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Which tokens count. Check that outputs, unembedding and labels fit."""
    alike({"outputs": outputs, "unembedding": unembedding})
    if outputs.ndim < 2 or unembedding.ndim != 2:
        raise CurvlensError(
            f"outputs has shape {tuple(outputs.shape)}, unembedding {tuple(unembedding.shape)}; expected (…, tokens, "
            "d) and (d, classes). One token is outputs[None]."
        )
    (d, classes), width = unembedding.shape, outputs.shape[-1]
    if d != width:
        fix = "nn.Linear stores (classes, d): give its weight.T." if classes == width else "Their d must be equal."
        raise CurvlensError(
            f"unembedding has shape {(d, classes)}, expected ({width}, classes) for outputs of shape "
            f"{tuple(outputs.shape)}. {fix}"
        )
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        given = labels.dtype if isinstance(labels, Tensor) else a_kind(labels)
        raise CurvlensError(f"labels is {given}, expected a tensor of integers, one class a token: labels.long().")
    if labels.shape != outputs.shape[:-1]:
        raise CurvlensError(
            f"labels has shape {tuple(labels.shape)}, expected {tuple(outputs.shape[:-1])}, a label for each token of "
            f"outputs of shape {tuple(outputs.shape)}."
        )
    counted = labels != ignore_index
    wrong = labels[counted & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise CurvlensError(
            f"There is a label {int(wrong[0])}, expected 0 to {classes - 1} or ignore_index={ignore_index}. Give the "
            "label of tokens that do not count as ignore_index=."
        )
    if not counted.any():
        raise CurvlensError(f"Every label is ignore_index={ignore_index}: no token counts, and there is no mean.")
    return counted
