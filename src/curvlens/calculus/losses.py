"""Second derivatives of the losses with respect to the outputs, in closed form and row by row.

Cross-entropy in all its forms (classes, soft targets, class weights, label smoothing, ignored tokens) is
ℓ = −Σ_c q_c log p_c with p = softmax(z) and a target q ≥ 0 of mass s = Σ_c q_c. Hence (`docs/math.md`, "Losses")

    ∂ℓ/∂z = s p − q,        ∂²ℓ/∂z² = s (diag p − p pᵀ) = s B Bᵀ,   B = diag(√p) − p √pᵀ.

The Hessian knows of the target only the mass s. Rows go through in chunks: besides logits, argument and result nothing
of the size of the logits is ever held, which is what makes a vocabulary of 50 000 affordable.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 1 << 20
"""Numbers in one chunk of rows: 8 MB in float64, inside the cache of most processors."""


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(classes, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _softmax(logits: Tensor) -> Tensor:
    """Probabilities, in float32 at least."""
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


def unembedded_cross_entropy(
    outputs: Float[Tensor, "*batch l d"],
    unembedding: Float[Tensor, "d c"],
    labels: Int[Tensor, "*batch l"],
    *,
    ignore_index: int = -100,
) -> tuple[Float[Tensor, "*batch l d"], Float[Tensor, "*batch l d d"]]:
    """Gradient and curvature, at every token's output f, of each sample's mean cross-entropy of the logits f E.

    g_i = E (p_i − y_i)/n and S_i = E (diag p_i − p_i p_iᵀ) Eᵀ/n, with n the counted tokens of the sample; both are zero
    where the label is ignored. They go into `curvlens.calculus.attention.hessian` as ``grad`` and ``curvature``.
    """
    gradient, root = unembedded_cross_entropy_root(outputs, unembedding, labels, ignore_index=ignore_index)
    return gradient, root @ root.mT


def unembedded_cross_entropy_root(
    outputs: Float[Tensor, "*batch l d"],
    unembedding: Float[Tensor, "d c"],
    labels: Int[Tensor, "*batch l"],
    *,
    ignore_index: int = -100,
) -> tuple[Float[Tensor, "*batch l d"], Float[Tensor, "*batch l d c"]]:
    """The same with a root R_i = E (diag √p_i − p_i √p_iᵀ)/√n of the curvature, S_i = R_i R_iᵀ.

    For ``curvature=attention.Root(R)``: with fewer classes than features S need not be built.
    """
    counted = labels != ignore_index
    p = _softmax(outputs @ unembedding)
    share = (counted.to(p.dtype) / counted.sum(-1, keepdim=True).clamp(min=1))[..., None]
    target = torch.zeros_like(p).scatter_(-1, labels.clamp(min=0)[..., None], 1.0)
    root = p.sqrt()[..., None, :] * (unembedding - unembedding @ p[..., None])
    gradient = share * ((p - target) @ unembedding.mT)
    return gradient.to(outputs.dtype), (share.sqrt()[..., None] * root).to(outputs.dtype)
