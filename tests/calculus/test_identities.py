"""Equations 9 to 14 and Lemmas B.2, B.3 and D.1: both sides against matrices written out entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from curvlens.calculus import theorems
from curvlens.calculus.vec import commutation, swap

Index = tuple[int, ...]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(rows: Sequence[int], columns: Sequence[int], entry: Callable[[Index, Index], float]) -> Tensor:
    """The matrix of these entries; super-indices in the order of their sizes, the last one fastest."""
    return torch.tensor(
        [[entry(i, j) for j in product(*map(range, columns))] for i in product(*map(range, rows))], dtype=torch.float64
    )


def all_are(sides: Sequence[Tensor], truth: Tensor) -> None:
    for side in sides:
        torch.testing.assert_close(side, truth, rtol=1e-14, atol=1e-14)


def test_equation_9() -> None:
    A, B, C, D = draw(2, 3), draw(4, 2, seed=1), draw(3, 2, seed=2), draw(2, 5, seed=3)
    a, b, c, d = (x.tolist() for x in (A, B, C, D))

    def entry(i: Index, j: Index) -> float:
        first = sum(a[i[0]][k] * c[k][j[0]] for k in range(3))
        return float(first * sum(b[i[1]][k] * d[k][j[1]] for k in range(2)))

    all_are(theorems.equation_9(A, B, C, D), written_out((2, 4), (2, 5), entry))


def test_equation_10() -> None:
    A, B = draw(3, 4), draw(2, 5, seed=1)
    truth = written_out((4, 5), (3, 2), lambda i, j: float(A[j[0], i[0]] * B[j[1], i[1]]))
    all_are(theorems.equation_10(A, B), truth)


def test_equation_11() -> None:
    a, b = draw(3), draw(4, seed=1)
    all_are(theorems.equation_11(a, b), written_out((4,), (3,), lambda i, j: float(b[i] * a[j])))


def test_equation_12() -> None:
    A, v, B = draw(3, 4), draw(3, seed=1), draw(4, 2, seed=2)
    truth = written_out((3,), (3, 2), lambda i, j: float(v[j[0]] * sum(A[i[0], k] * B[k, j[1]] for k in range(4))))
    all_are(theorems.equation_12(A, v, B), truth)


def test_equation_13() -> None:
    A = draw(3, 4)
    all_are(theorems.equation_13(A), torch.tensor([[x] for row in A.tolist() for x in row], dtype=torch.float64))


def test_equation_14() -> None:
    blocks, B, C = draw(3, 2, 4), draw(3, 5, seed=1), draw(4, 2, seed=2)

    def entry(i: Index, j: Index) -> float:
        return float(B[i[0], j[0]] * sum(blocks[i[0], i[1], r] * C[r, j[1]] for r in range(4)))

    all_are(theorems.equation_14(blocks, B, C), written_out((3, 2), (5, 2), entry))


@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 2), (2, 2), (1, 3)])
def test_commutation_matrices_of_both_conventions(m: int, n: int) -> None:
    like = draw(1)
    # K_{m,n} vec B = vec Bᵀ for B of n rows and m columns: row (i, j) of Bᵀ is entry (j, i) of B
    truth = written_out((m, n), (n, m), lambda i, j: float(i == j[::-1]))
    all_are([commutation(m, n, like)], truth)
    # [K(M, N)]_{(nm),(m'n')} = δ_nn' δ_mm', as Lemma B.2 has it
    all_are([swap(m, n, like)], written_out((n, m), (m, n), lambda i, j: float(i[0] == j[1] and i[1] == j[0])))


@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 2), (2, 2), (1, 3)])
def test_lemma_b_2(m: int, n: int) -> None:
    # row (a, n, b), column n': δ_ab δ_nn', which is what K(M, N) makes of vec I_M ⊗ I_N
    truth = written_out((m, n, m), (n,), lambda i, j: float(i[0] == i[2] and i[1] == j[0]))
    all_are(theorems.lemma_b_2(m, n, draw(1)), truth)


@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 2), (2, 2)])
def test_lemma_b_3(m: int, n: int) -> None:
    A = draw(m, n)
    # vec A ⊗ A has A_ij A_kl in row (i, j, k) and column l; K_{m,n} exchanges j and k
    all_are(theorems.lemma_b_3(A), written_out((m, m, n), (n,), lambda i, j: float(A[i[0], i[2]] * A[i[1], j[0]])))


@pytest.mark.parametrize(
    ("A", "B", "ranks"),
    [
        (draw(3, 4), draw(2, 5, seed=1), (3, 2)),
        (draw(3, 1) @ draw(1, 4, seed=1), draw(4, 2, seed=2) @ draw(2, 3, seed=3), (1, 2)),
        (draw(5, 2), torch.zeros(2, 3, dtype=torch.float64), (2, 0)),
        (draw(2, 2), draw(3, 3, seed=1), (2, 3)),
    ],
)
def test_lemma_d_1(A: Tensor, B: Tensor, ranks: tuple[int, int]) -> None:
    (m, n), (p, q) = A.shape, B.shape
    upper = written_out((q, m), (q, n), lambda i, j: float(A[i[1], j[1]]) if i[0] == j[0] else 0.0)
    lower = written_out((p, n), (q, n), lambda i, j: float(B[i[0], j[0]]) if i[1] == j[1] else 0.0)
    rank = int(np.linalg.matrix_rank(np.concatenate([upper.numpy(), lower.numpy()])))
    assert theorems.lemma_d_1(A, B) == (rank, q * ranks[0] + n * ranks[1] - ranks[0] * ranks[1])
    assert rank == q * ranks[0] + n * ranks[1] - ranks[0] * ranks[1]
