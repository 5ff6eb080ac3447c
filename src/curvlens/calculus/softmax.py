"""The softmax of rows, its first and second derivative (Lemmas B.1 and C.1).

One row a = softmax(t) has ∂a/∂t = diag a − a aᵀ and ∂²a_j/∂t² = a_j ((e_j − a)(e_j − a)ᵀ − diag a + a aᵀ). A loss needs
the second derivative contracted with a cotangent λ at a. With w = a∘(λ − ⟨a, λ⟩), the gradient at t, it is

    Σ_j λ_j ∂²a_j/∂t² = diag w − a wᵀ − w aᵀ .

A row without any allowed entry is zero, and so are its derivatives.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvlens.calculus.vec import block_diagonal, identity, kron
from curvlens.errors import CurvlensError


def softmax(
    scores: Float[Tensor, "*batch l k"], allowed: Bool[Tensor, ...] | None = None
) -> Float[Tensor, "*batch l k"]:
    """Softmax over the last axis where ``allowed``; rows without any allowed entry are zero."""
    if allowed is None:
        return scores.softmax(-1)
    if allowed.dtype != torch.bool:
        raise CurvlensError(
            f"allowed is {allowed.dtype}, expected a boolean tensor, True where attended. A float mask is added to the "
            "scores instead: softmax(scores + mask)."
        )
    rows = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return rows.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def jacobian_rows(a: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k k"]:
    """∂a/∂t = diag a − a aᵀ, of each row."""
    return a.diag_embed() - a[..., :, None] * a[..., None, :]


def second_rows(a: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k k k"]:
    """∂²a_j/∂t_k∂t_l at [j, k, l], of each row (Lemma C.1)."""
    from_mean = identity(a.shape[-1], a) - a[..., None, :]  # [j, k] = δ_jk − a_k
    return a[..., :, None, None] * (
        from_mean[..., :, :, None] * from_mean[..., :, None, :] - jacobian_rows(a)[..., None, :, :]
    )


def gradient_rows(a: Float[Tensor, "*batch k"], cotangent: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """w = (∂a/∂t) λ = a∘(λ − ⟨a, λ⟩): the symmetric ∂a/∂t applied to a vector.

    λ is first shifted by its value at the largest entry of a, so that nothing cancels if a row is nearly one-hot: the
    result is as accurate as the small entries of a.
    """
    top = a.argmax(-1, keepdim=True)
    shifted = cotangent - cotangent.gather(-1, top)
    return a * (shifted - (a * shifted).sum(-1, keepdim=True))


def jacobian(attention: Float[Tensor, "l l"]) -> Float[Tensor, "ll ll"]:
    """∂A/∂T = blockdiag_i (diag A_i − A_i A_iᵀ) of a matrix, on row-vecs (Lemma B.1, Equation 19)."""
    return block_diagonal(jacobian_rows(attention))


def second_derivative(attention: Float[Tensor, "l l"]) -> Float[Tensor, "llll ll"]:
    """∂²A/∂T∂T = blockdiag_i D_i, D_i = [e_i ⊗ ∂²A_ij/∂T_i∂T_i]_j (Lemma C.1, whose left side is misprinted as ∂²F)."""
    eye = identity(attention.shape[0], attention)
    blocks = [
        torch.cat([kron(eye[:, i, None], entry) for entry in entries])
        for i, entries in enumerate(second_rows(attention))
    ]
    return block_diagonal(blocks)
