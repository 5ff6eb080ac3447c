"""Central moments of the keys under the rows of an attention matrix (Definition 3.1), accurate for saturated rows too.

Row i of A is a distribution over tokens; m_i = Σ_j A_ij x_j is its mean, M2_i its covariance, M3_i its third central
moment. They are the first three derivatives of the row's potential Φ_i(κ) = log Σ_j exp(x_jᵀκ + mask_ij)
(`docs/explanation/math.md`, "Attention"). The Hessian of attention needs M3 only contracted with a vector, and never
builds it.

If a row is nearly one-hot, E[xxᵀ] − m mᵀ is a difference of two numbers of size 1 with a result of size 1 − max A.
So m − r is summed first, with the token r = x_j* of the largest weight: in Σ_j A_ij (x_j − r) the term of j* is zero.
Moments are sums of products of the deviations x_j − m = (x_j − r) − (m − r). Every number is then a sum of terms of its
own size, and as accurate as the small entries of A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.magnitude import largest
from curvlens.calculus.softmax import jacobian, second_derivative
from curvlens.calculus.vec import commutation, identity, khatri_rao, kron, vec

CHUNK = 1 << 18
"""Numbers in a chunk of token differences, one for every pair of a row and a token: 2 MB in float64."""


class Moments(NamedTuple):
    """The first three attention moments of every row."""

    M1: Float[Tensor, "*batch l d"]
    M2: Float[Tensor, "*batch l d d"]
    M3: Float[Tensor, "*batch l d d d"]

    def __repr__(self) -> str:
        return f"Moments({', '.join(f'{name} {tuple(m.shape)}' for name, m in self._asdict().items())})"


def _largest(a: Tensor, x: Tensor) -> Tensor:
    """The token r with the largest weight for each row of A, for x (…, k, d); any token for an empty row."""
    top = a.argmax(-1, keepdim=True)
    return x.gather(-2, top.expand(*top.shape[:-1], x.shape[-1]))


def moments(attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*#batch k d"]) -> Moments:
    """M1, M2 and M3 of every row, by their definition, Σ_j A_ij (x_j − m_i)^{⊗n}.

    M3 has l·d³ numbers. The Hessian of attention uses `contracted` instead.
    """
    x = x.expand(*attention.shape[:-2], *x.shape[-2:])
    y = deviations(attention, x)
    weighted = attention[..., None] * y
    second = weighted.transpose(-1, -2) @ y
    third = torch.einsum("...jp,...jq,...jr->...pqr", weighted, y, y)
    return Moments(attention @ x, second, third)


def deviations(attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*batch k d"]) -> Float[Tensor, "*batch l k d"]:
    """x_j − m_i for every row i and token j. Small results are differences of small numbers."""
    z = x[..., None, :, :] - _largest(attention, x)[..., :, None, :]
    if 2 * largest(x) > torch.finfo(x.dtype).max:  # the difference to a token that the row does not see may overflow
        z = z.where(attention[..., None] > 0, 0.0)
    return z - attention.unsqueeze(-2) @ z


class Contracted(NamedTuple):
    """The moments that the Hessian of attention needs, for every row of A."""

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
    """M1, M2, M2 u and M3 contracted with u, for one vector u_i per row (u_i = W_V g_i in the Hessian of attention)."""
    lead, (k, d) = attention.shape[:-1], x.shape[-2:]
    a, x = attention.reshape(-1, lead[-1], k), x.expand(*lead[:-1], k, d).reshape(-1, k, d)
    found = (torch.bmm(a, x).flatten(0, 1), *contracted_rows(a, x, u.reshape(-1, lead[-1], d)))
    return Contracted(*(part.view(*lead, *part.shape[1:]) for part in found))


def contracted_rows(
    attention: Float[Tensor, "s l k"], x: Float[Tensor, "s k d"], u: Float[Tensor, "s l d"], tau: float = 1.0
) -> tuple[Float[Tensor, "n d d"], Float[Tensor, "n d"], Float[Tensor, "n d d"]]:
    """τ M2, M2 u and τ² G of the rows of all samples, concatenated: each κ contributes a factor τ."""
    r = _largest(attention, x)
    samples, rows, k = attention.shape
    chunks = _chunks(samples, rows, k * x.shape[2])
    if len(chunks) == 1:
        return _about(attention, x, r, u, tau)
    pieces = [_about(attention[i, j], x[i], r[i, j], u[i, j], tau) for i, j in chunks]
    second, first_order, third = map(torch.cat, zip(*pieces, strict=True))
    return second, first_order, third


def _chunks(samples: int, rows: int, each: int) -> list[tuple[slice, slice]]:
    """Slices of some samples, or of some rows of one sample, with ``each`` numbers in a row."""
    step = max(1, CHUNK // (rows * each))
    tall = rows if step > 1 else max(1, CHUNK // each)
    return [(slice(i, i + step), slice(j, j + tall)) for i in range(0, samples, step) for j in range(0, rows, tall)]


def _about(a: Tensor, x: Tensor, r: Tensor, u: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """The contracted moments of some rows (n, l), concatenated, from A (n, l, k) and the tokens r.

    No large numbers cancel: neither a common offset of all tokens, nor one of the tokens that a row attends to.
    """
    z = (x.unsqueeze(1) - r.unsqueeze(2)).flatten(0, 1)
    a, u = a.flatten(0, 1).unsqueeze(-1), u.flatten(0, 1).unsqueeze(-1)
    y, w, p = _first_order(a, z, u)
    if not math.isfinite(float(p.sum())):  # tokens that a row does not see may have any size
        y, w, p = _first_order(a, z.where(a > 0, 0.0), u)
    # scaled last: weights may be the smallest numbers of their dtype
    second, third = torch.bmm((a * y).mT, y).mul_(tau), torch.bmm((w * y).mT, y).mul_(tau**2)
    return second, p.squeeze(1), third


def _first_order(a: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The deviations x_j − m (n, k, d), W = ∂ℓ/∂T (n, k, 1) and p (n, 1, d), from z_j = x_j − r."""
    y = z - torch.bmm(a.mT, z)
    w = a * torch.bmm(y, u)
    return y, w, torch.bmm(w.mT, y)


def from_origin(
    attention: Float[Tensor, "*batch l k"], x: Float[Tensor, "*#batch k d"]
) -> tuple[Float[Tensor, "*batch 1 d"], Float[Tensor, "*batch k d"]]:
    """The median of the tokens that some row sees, entry by entry, and the tokens minus it; unseen tokens become 0.

    Padding or a masked token may have any size. It must not affect the others, even if it sees itself.
    """
    seen = attention.amax(-2, keepdim=True)
    if float(seen.min()) > 0:
        origin = x.median(-2, keepdim=True).values
        return origin, x - origin
    visible = (seen > 0).mT
    origin = x.where(visible, torch.nan).nanmedian(-2, keepdim=True).values.nan_to_num(0.0)
    return origin, (x - origin).where(visible, 0.0)


def uncentred(x: Float[Tensor, "*batch k d"], allowed: Float[Tensor, "*batch l k"]) -> Float[Tensor, "*batch l d d"]:
    """Ξ_i = Σ_j allowed_ij x_j x_jᵀ, which replaces M2 for linear attention."""
    d = x.shape[-1]
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
