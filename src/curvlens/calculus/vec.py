"""Row-vec, Kronecker and Khatri–Rao products, commutation matrices: the notation of the theorems.

``vec(A) = A.reshape(-1)`` stacks the rows, so vec(A X B) = (A ⊗ Bᵀ) vec(X) (`docs/explanation/math.md`,
"Conventions"). These matrices are large and mostly zeros. `curvlens.calculus.theorems` builds them for small sizes;
the structured forms of `curvlens.calculus.attention` never do.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.errors import CurvlensError


def vec(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch mn"]:
    """The rows of a matrix, one after the other: vec_r."""
    return matrix.reshape(*matrix.shape[:-2], -1)


def unvec(vector: Float[Tensor, "*batch mn"], rows: int, columns: int) -> Float[Tensor, "*batch m n"]:
    """The matrix of given size whose `vec` is the vector."""
    if not vector.ndim or vector.shape[-1] != rows * columns:
        raise CurvlensError(
            f"A vector of shape {tuple(vector.shape)} is not a {rows} × {columns} matrix: its last axis must have "
            f"{rows * columns} entries."
        )
    return vector.reshape(*vector.shape[:-1], rows, columns)


def kron(*factors: Float[Tensor, "_ _"]) -> Float[Tensor, "_ _"]:
    """A ⊗ B ⊗ …, of any number of matrices (Definition A.1)."""
    if not factors or any(factor.ndim != 2 for factor in factors):
        given = ", ".join(str(tuple(factor.shape)) for factor in factors)
        raise CurvlensError(
            f"kron takes one matrix or more, got shapes [{given}]: a vector is a matrix of one column, v[:, None]."
        )
    product = factors[0]
    for factor in factors[1:]:
        # by hand: torch.kron (2.13) fails on the transpose of a single row
        (m, n), (p, q) = product.shape, factor.shape
        product = (product[:, None, :, None] * factor[None, :, None, :]).reshape(m * p, n * q)
    return product


def khatri_rao(*factors: Float[Tensor, "_ _"], rows: int, columns: int = 1) -> Float[Tensor, "_ _"]:
    """The Kronecker product block by block, for matrices cut into ``rows`` × ``columns`` equal blocks (Definition A.2).

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> khatri_rao(x, x, rows=2)  # each row with itself
    tensor([[ 1.,  2.,  2.,  4.],
            [ 9., 12., 12., 16.]])
    """
    for factor in factors:
        if factor.shape[0] % rows or factor.shape[1] % columns:
            raise CurvlensError(
                f"A matrix of shape {tuple(factor.shape)} cannot be cut into {rows} × {columns} equal blocks."
            )
    blocks = [[f.chunk(columns, 1) for f in factor.chunk(rows, 0)] for factor in factors]
    return torch.cat([torch.cat([kron(*(b[i][j] for b in blocks)) for j in range(columns)], 1) for i in range(rows)], 0)


def block_diagonal(blocks: Float[Tensor, "n p q"] | list[Tensor]) -> Float[Tensor, "_ _"]:
    """The matrix with these blocks on its diagonal."""
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix


def identity(n: int, like: Tensor) -> Float[Tensor, "n n"]:
    """I_n in the dtype and on the device of another tensor."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def commutation(m: int, n: int, like: Tensor) -> Float[Tensor, "mn mn"]:
    """K_{m,n}, with K_{m,n} vec(B) = vec(Bᵀ) for B of shape **n × m**. Its transpose is K_{n,m}."""
    order = torch.arange(m * n, device=like.device).reshape(n, m).T.reshape(-1)
    return identity(m * n, like)[order]


def swap(m: int, n: int, like: Tensor) -> Float[Tensor, "mn mn"]:
    """K(M, N) of Lemma B.2, which maps the index (m n) to (n m): the other convention, K(M, N) = K_{N,M}."""
    return commutation(n, m, like)


def shuffle(d: int, like: Tensor, out: int | None = None) -> Float[Tensor, "_ d"]:
    """S = (I_o ⊗ K_{d,o}) (vec I_o ⊗ I_d), of shape o² d × d, with o = d in print (Theorem 3.2)."""
    out = d if out is None else out
    eye = identity(out, like)
    return kron(eye, commutation(d, out, like)) @ kron(vec(eye)[:, None], identity(d, like))


def residual(difference: Float[Tensor, "l d"], m: int) -> Float[Tensor, "m mld"]:
    """R_m = vec(F − Y)ᵀ ⊗ I_m, of shape m × m L d_V (Theorem 3.2)."""
    return kron(vec(difference)[None, :], identity(m, difference))
