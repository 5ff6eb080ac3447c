"""Central moments of the keys under the rows of an attention matrix (Definition 3.1), also where attention saturates.

Row i of A is a distribution over tokens; m_i = Σ_j A_ij x_j is its mean, M2_i its covariance, M3_i its third central
moment. They are the first three derivatives of the row's potential Φ_i(κ) = log Σ_j exp(x_jᵀκ + mask_ij)
(`docs/math.md`, "Attention"). The Hessian of attention needs M3 only contracted with a vector, and never builds it.

Where a row is nearly one-hot, E[xxᵀ] − m mᵀ is a difference of two numbers of size 1 for a result of size 1 − max A.
All sums here are taken about the token r = x_j* with the largest weight and over the others only: A₀ is A with that
entry struck out. Then every number is a sum of terms of its own size, and as exact as A's small entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.inputs import row_names
from curvlens.calculus.softmax import jacobian, second_derivative
from curvlens.calculus.vec import commutation, identity, khatri_rao, kron, vec


class Moments(NamedTuple):
    """The first three attention moments of every row."""

    M1: Float[Tensor, "*batch l d"]
    M2: Float[Tensor, "*batch l d d"]
    M3: Float[Tensor, "*batch l d d d"]


def _about_largest(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens r where A is largest, and m − r, for x (…, k, d)."""
    rest, r, *_ = _without_largest(a, x)
    return r, rest @ x - rest.sum(-1, keepdim=True) * r


def _without_largest(a: Tensor, x: Tensor, names: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A without its largest entries, the tokens r there, where that is, and 1 for rows with any entry, else 0.

    For x (…, k, d); r of an empty row is 0. Tokens of one name (…, k) are copies of each other, struck out together.
    """
    largest, top = a.max(-1, keepdim=True)
    alive = (largest > 0).to(a.dtype)
    if names is None:
        rest = a.scatter(-1, top, 0.0)
    else:
        wide = names[..., None, :].expand(a.shape)
        rest = a.where(wide != wide.gather(-1, top), 0.0)
    r = x.gather(-2, top.expand(*top.shape[:-1], x.shape[-1])) * alive
    return rest, r, top, alive


def moments(attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*#batch k d"]) -> Moments:
    """M1, M2 and M3 of every row, by their definition, Σ_j A_ij (x_j − m_i)^{⊗n}.

    M3 has l·d³ numbers. For the Hessian of attention `contracted` is what is needed.
    """
    x = x.expand(*attention.shape[:-2], *x.shape[-2:])
    y = deviations(attention, x)
    weighted = attention[..., None] * y
    second = weighted.transpose(-1, -2) @ y
    third = torch.einsum("...jp,...jq,...jr->...pqr", weighted, y, y)
    r, from_r = _about_largest(attention, x)
    return Moments(r + from_r, second, third)


def deviations(attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*batch k d"]) -> Float[Tensor, "*batch l k d"]:
    """x_j − m_i for every row i and token j; what is small is a difference of small numbers."""
    r, from_r = _about_largest(attention, x)
    return (x[..., None, :, :] - r[..., :, None, :]) - from_r[..., :, None, :]


class Contracted(NamedTuple):
    """What the Hessian of attention needs of the moments, a row of A each."""

    mean: Float[Tensor, "*batch l d"]
    """m = M1."""
    second: Float[Tensor, "*batch l d d"]
    """M2."""
    first_order: Float[Tensor, "*batch l d"]
    """p_i = M2_i u_i = Σ_j W_ij x_j, with W = ∂ℓ/∂T."""
    third: Float[Tensor, "*batch l d d"]
    """G_i = Σ_c (u_i)_c M3_i[c]."""


def contracted(
    attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*#batch k d"], u: Float[Tensor, "*batch l d"]
) -> Contracted:
    """M1, M2, M2 u and M3 contracted with u, for a vector u_i a row (u_i = W_V g_i in the Hessian of attention).

    Both moments are one matrix product, [A₀; W] times the k × d² matrix of the x_j x_jᵀ, and corrections of rank 2 and
    3. The tokens are taken from a common origin beforehand: M2 and M3 do not change, and a large common offset does
    not cancel.
    """
    origin, y = from_origin(attention, x)
    y = y.expand(*attention.shape[:-2], *y.shape[-2:])
    rest, r, top, alive = _without_largest(attention, y, _copies(x))
    s = u @ y.mT
    s = s - s.gather(-1, top)  # u·(x_j − r)
    w = rest * (s - (rest * s).sum(-1, keepdim=True))  # ∂ℓ/∂T but for the largest entry, which is −Σ_j w_j
    both, rs = torch.cat([rest, w], -2), torch.cat([r, r], -2)
    squares = (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
    raw, linear = (both @ squares).view(*both.shape[:-1], *y.shape[-1:], -1), both @ y
    about_r = linear.addcmul(both.sum(-1, keepdim=True), rs, value=-1)
    from_r, p = about_r.chunk(2, -2)
    mean = r + from_r
    second, third = _minus(raw, (linear, rs), (torch.cat([mean, mean], -2), about_r)).chunk(2, -3)
    third = third.addcmul(p.unsqueeze(-1), from_r.unsqueeze(-2), value=-1)
    return Contracted(mean.addcmul(origin, alive), second, p, third)


def _copies(x: Tensor) -> Tensor | None:
    """A number for every token (…, k), the same for equal tokens; None if no two are equal."""
    first = x[..., 0].flatten().tolist()
    if len(set(first)) == len(first):  # copies would share it
        return None
    names = row_names((x.detach() + 0.0).reshape(-1, x.shape[-1]))  # a zero has two signs, and is one number
    if max(names) + 1 == len(names):
        return None
    return torch.tensor(names, device=x.device).view(x.shape[:-1])


def from_origin(
    attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*#batch k d"]
) -> tuple[Float[Tensor, "*batch 1 d"], Float[Tensor, "*batch k d"]]:
    """The median of the tokens that any row sees, entry by entry, and the tokens from there; those unseen are 0.

    Padding, or a token that is masked, may be of any size: it must not move the others, also where it sees itself.
    """
    seen = attention.amax(-2, keepdim=True)
    if float(seen.min()) > 0:
        origin = x.median(-2, keepdim=True).values
        return origin, x - origin
    visible = (seen > 0).mT
    origin = x.where(visible, torch.nan).nanmedian(-2, keepdim=True).values.nan_to_num(0.0)
    return origin, (x - origin).where(visible, 0.0)


def _minus(matrices: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """M − Σ a bᵀ over pairs of vectors (a, b), as one product of rank len(pairs)."""
    a = torch.stack([left for left, _ in pairs], -1)
    b = torch.stack([right for _, right in pairs], -2)
    shape = matrices.shape
    flat = torch.baddbmm(matrices.reshape(-1, *shape[-2:]), a.flatten(0, -3), b.flatten(0, -3), alpha=-1)
    return flat.view(shape)


def uncentred(x: Float[Tensor, "*batch k d"], allowed: Float[Tensor, "*batch l k"]) -> Float[Tensor, "*batch l d d"]:
    """Ξ_i = Σ_j allowed_ij x_j x_jᵀ, which stands in the place of M2 where attention is linear."""
    d = x.shape[-1]
    x = x.where((allowed.amax(-2, keepdim=True) > 0).mT, 0.0)  # what nobody sees may be of any size
    squares = (x[..., :, :, None] * x[..., :, None, :]).flatten(-2)
    return (allowed @ squares).reshape(*allowed.shape[:-1], d, d)


# The matrices of the theorems, for small sizes


def z1(attention: Float[Tensor, "l l"], x: Float[Tensor, "l d"]) -> Float[Tensor, "ld dd"]:
    """Z1 = X * M2, the Khatri–Rao product of rows x_iᵀ with M2_i (Remark 3.1)."""
    return khatri_rao(x, moments(attention, x).M2.flatten(0, 1), rows=x.shape[0])


def z2(attention: Float[Tensor, "l l"], x: Float[Tensor, "l d"]) -> Float[Tensor, "lddd dd"]:
    """Z2 = (I_L ⊗ K_{d,d} ⊗ I_d)(vec X * X * M3), whose rows of blocks are x_i x_iᵀ ⊗ M3_i.

    Remark 3.1 prints X * Xᵀ * M3, which is undefined; its proof has the blocks given here.
    """
    rows, d = x.shape
    third = moments(attention, x).M3.reshape(rows * d * d, d)
    blocks = khatri_rao(vec(x)[:, None], x, third, rows=rows)
    return kron(identity(rows, x), commutation(d, d, x), identity(d, x)) @ blocks


def z1_by_definition(attention: Float[Tensor, "l l"], x: Float[Tensor, "l d"]) -> Float[Tensor, "ld dd"]:
    """Z1 = (I_L ⊗ Xᵀ)(∂A/∂T)(X ⊗ X) (Theorem 3.1)."""
    return kron(identity(x.shape[0], x), x.T) @ jacobian(attention) @ kron(x, x)


def z2_by_definition(attention: Float[Tensor, "l l"], x: Float[Tensor, "l d"]) -> Float[Tensor, "lddd dd"]:
    """Z2 = (I_L ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X) (Theorem 3.2)."""
    return kron(identity(x.shape[0], x), x.T, x.T, x.T) @ second_derivative(attention) @ kron(x, x)
