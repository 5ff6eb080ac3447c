"""Identities of Kronecker products and commutation matrices (Appendix A, Lemmas B.2, B.3 and D.1)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.vec import block_diagonal, commutation, identity, kron, swap, vec

Matrix = Float[Tensor, "_ _"]
Sides = tuple[Matrix, Matrix]


def equation_9(A: Matrix, B: Matrix, C: Matrix, D: Matrix) -> Sides:
    """(A ⊗ B)(C ⊗ D) = AC ⊗ BD."""
    return kron(A, B) @ kron(C, D), kron(A @ C, B @ D)


def equation_10(A: Matrix, B: Matrix) -> Sides:
    """(A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ."""
    return kron(A, B).T, kron(A.T, B.T)


def equation_11(a: Float[Tensor, " m"], b: Float[Tensor, " n"]) -> tuple[Matrix, Matrix, Matrix]:
    """aᵀ ⊗ b = b aᵀ = b ⊗ aᵀ for columns a and b."""
    return kron(a[None, :], b[:, None]), b[:, None] @ a[None, :], kron(b[:, None], a[None, :])


def equation_12(A: Matrix, v: Float[Tensor, " n"], B: Matrix) -> Sides:
    """A (vᵀ ⊗ B) = vᵀ ⊗ A B."""
    return A @ kron(v[None, :], B), kron(v[None, :], A @ B)


def equation_13(A: Float[Tensor, "m n"]) -> Sides:
    """vec A = (A ⊗ I_n) vec I_n for A of shape m × n.

    Corrected: printed is (A ⊗ I_n) vec **A**; the proof's last line has vec I_n.
    """
    eye = identity(A.shape[1], A)
    return vec(A)[:, None], kron(A, eye) @ vec(eye)[:, None]


def equation_14(blocks: Float[Tensor, "m q r"], B: Float[Tensor, "m n"], C: Float[Tensor, "r t"]) -> Sides:
    """blockdiag(A_i)(B ⊗ C) = [B_i ⊗ A_i C]_i, rows of B with the blocks A_i."""
    stacked = torch.cat([kron(row[None, :], block @ C) for row, block in zip(B, blocks, strict=True)])
    return block_diagonal(blocks) @ kron(B, C), stacked


def equation_15(A: Matrix, B: Matrix) -> Matrix:
    """∂(A X B)/∂X = A ⊗ Bᵀ."""
    return kron(A, B.T)


def equation_16(X: Float[Tensor, "n q"], Y: Float[Tensor, "p r"]) -> Matrix:
    """∂(X ⊗ Y)/∂X = (I_n ⊗ K_{p,q} ⊗ I_r)(I_{nq} ⊗ vec Y)."""
    (n, q), (p, r) = X.shape, Y.shape
    return _spread(n, p, q, r, X) @ kron(identity(n * q, X), vec(Y)[:, None])


def equation_17(X: Float[Tensor, "n q"], Y: Float[Tensor, "p r"]) -> Matrix:
    """∂(X ⊗ Y)/∂Y = (I_n ⊗ K_{p,q} ⊗ I_r)(vec X ⊗ I_{pr})."""
    (n, q), (p, r) = X.shape, Y.shape
    return _spread(n, p, q, r, X) @ kron(vec(X)[:, None], identity(p * r, X))


def _spread(n: int, p: int, q: int, r: int, like: Tensor) -> Matrix:
    return kron(identity(n, like), commutation(p, q, like), identity(r, like))


def equation_18(X: Float[Tensor, "n q"]) -> Matrix:
    """∂Xᵀ/∂X = K_{q,n}."""
    n, q = X.shape
    return commutation(q, n, X)


def lemma_b_2(m: int, n: int, like: Tensor) -> Sides:
    """(I_M ⊗ K(M,N))(vec I_M ⊗ I_N) = (K(N,M) ⊗ I_M)(I_N ⊗ vec I_M), with K(M, N) = `curvlens.calculus.vec.swap`."""
    one, other = identity(m, like), identity(n, like)
    column = vec(one)[:, None]
    return (
        kron(one, swap(m, n, like)) @ kron(column, other),
        kron(swap(n, m, like), one) @ kron(other, column),
    )


def lemma_b_3(A: Float[Tensor, "m n"]) -> Sides:
    """(I_m ⊗ K_{m,n})(vec A ⊗ A) = (A ⊗ A ⊗ I_n)(I_n ⊗ K_{n,n})(vec I_n ⊗ I_n)."""
    m, n = A.shape
    eye = identity(n, A)
    left = kron(identity(m, A), commutation(m, n, A)) @ kron(vec(A)[:, None], A)
    return left, kron(A, A, eye) @ kron(eye, commutation(n, n, A)) @ kron(vec(eye)[:, None], eye)


def lemma_d_1(A: Float[Tensor, "m n"], B: Float[Tensor, "p q"]) -> tuple[int, int]:
    """rk [I_q ⊗ A; B ⊗ I_n] = q rk A + n rk B − rk A rk B."""
    n, q = A.shape[1], B.shape[1]
    stacked = torch.cat([kron(identity(q, A), A), kron(B, identity(n, A))])
    a, b = int(torch.linalg.matrix_rank(A)), int(torch.linalg.matrix_rank(B))
    return int(torch.linalg.matrix_rank(stacked)), q * a + n * b - a * b
