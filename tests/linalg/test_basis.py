"""The basis of a search: sums of long vectors, few vectors, no copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import curvlens as cl
import small
from curvlens.linalg.basis import Basis
from curvlens.linalg.vectors import LONG, distance, dot, norm
from curvlens.operators.curvature import Curvature
from spectra import matrix, spectra

CPU = torch.device("cpu")
N = LONG + 1000


class Diagonal(cl.operators.Operator):
    """A diagonal matrix in float32."""

    def __init__(self, entries: Tensor) -> None:
        like = cl.operators.as_operator(torch.eye(1)).rows
        layout = type(like)({"x": (len(entries),)})
        super().__init__(layout, layout, dtype=torch.float32, device=CPU, symmetric=True, name="Diagonal")
        self.entries = entries

    def _apply(self, vectors: Tensor, progress: Any) -> Tensor:
        return self.entries[:, None] * vectors


def outliers() -> Tensor:
    """A bulk in [0, 0.1], and 1 twice."""
    entries = torch.rand(N, generator=torch.Generator().manual_seed(0)) / 10
    entries[[5, N - 7]] = 1.0
    return entries


def true_dot(u: Tensor, v: Tensor) -> np.float64:
    """⟨u, v⟩ by pairwise summation, which torch's products do not do: ``w.double().norm()`` is off by 2e-12."""
    product: np.float64 = np.sum(u.double().numpy() * v.double().numpy())
    return product


class NoLongFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses float64 tensors as long as the vectors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            assert not (isinstance(x, Tensor) and x.dtype == torch.float64 and x.numel() >= N), func
        return result


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
def test_no_vector_is_copied_to_float64() -> None:
    with NoLongFloat64():  # type: ignore[no-untyped-call]
        result = cl.eigs(Diagonal(outliers()), 2, tol=1e-3)
    torch.testing.assert_close(result.values, torch.ones(2).double(), atol=1e-6, rtol=0)
    assert float(result.residuals.max()) < 1e-3
    true = (outliers().double()[:, None] * result.vectors.double() - result.vectors.double() * result.values).norm(
        dim=0
    )
    torch.testing.assert_close(result.residuals, true, atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("kind", ["normal", "signs", "constant"])
def test_sums_of_long_float32_vectors(kind: str) -> None:
    """Signs and constants are where float32 sums have a bias: 3e-5 of the sum, if nothing corrects them."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(4, N, generator=generator)
    rows = {"normal": draws, "signs": draws.sign(), "constant": draws.sign()}[kind]
    rows[0] = 1.0 if kind == "constant" else rows[0]
    basis = Basis(3, N, dtype=torch.float32, device=CPU, store="device")
    for j in range(3):
        basis.put(j, rows[j], norm(rows[j]))
    w = (rows[3] + 50 * rows[0] - 7 * rows[1]) / N**0.5
    exact, size = torch.tensor([true_dot(v, w) for v in basis.rows]), true_dot(w, w) ** 0.5
    assert norm(w) == pytest.approx(size, rel=1e-12)
    assert dot(basis[0], w) == pytest.approx(float(exact[0]), rel=1e-12)
    torch.testing.assert_close(basis.dots(3, w), exact, atol=1e-12 * size, rtol=0)
    first, before = basis.sweep(w, 3)
    assert before == pytest.approx(size, rel=1e-12)
    first = first.float().double()
    more, after = basis.sweep(w, 3, subtract=first)
    assert after == pytest.approx(true_dot(w, w) ** 0.5, rel=1e-12)
    # What is left is measured as it is; together they are right but for the rounding of w where they are taken out.
    torch.testing.assert_close(more, torch.tensor([true_dot(v, w) for v in basis.rows]), atol=1e-8 * after, rtol=1e-4)
    gram = torch.tensor([[true_dot(u, v) for v in basis.rows] for u in basis.rows])
    assert float((exact - gram @ first - more).abs().max()) < torch.finfo(torch.float32).eps / 2 * size


def test_rotations_of_long_float32_vectors() -> None:
    generator = torch.Generator().manual_seed(2)
    basis = Basis(3, N, dtype=torch.float32, device=CPU, store="device")
    basis.rows.normal_(generator=generator)
    S = torch.linalg.qr(torch.randn(3, 2, generator=generator, dtype=torch.float64))[0]
    exact = S.T @ basis.rows.double()
    basis.rotate(S)
    torch.testing.assert_close(basis.rows[:2].double(), exact, atol=1e-6, rtol=0)
    assert distance(basis[0], 1.0, exact[0].float()) < 1e-7 * N**0.5
    assert abs(float(basis.rows[0].double() @ basis.rows[1].double()) - float(exact[0] @ exact[1])) < 1e-8 * N


# Few basis vectors


@pytest.mark.parametrize("ends", ["largest", "smallest", "both", "magnitude"])
@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("name", ["triples over zeros", "triples at both ends", "rank one"])
def test_few_basis_vectors(name: str, extra: int, ends: Any) -> None:
    A = matrix(spectra()[name])
    values = torch.linalg.eigvalsh(A)
    truth = {
        "largest": values[-2:],
        "smallest": values[:2],
        "both": values[[0, 1, -2, -1]],
        "magnitude": values[values.abs().argsort(descending=True)[:2].sort().values],
    }[ends]
    basis = len(truth) + 3 + (ends in ("both", "magnitude")) + extra
    rest = max(3, len(truth), 2 * len(truth) + 2 - basis)
    result = cl.eigs(A, 2, ends, memory=(basis + rest) * 8 * len(A), tol=1e-6, max_products=2000)
    assert result.provenance["basis"] <= basis + 1
    assert bool(result.converged.all())
    torch.testing.assert_close(result.values.abs().sort().values, truth.abs().sort().values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_survives_restarts(seed: int) -> None:
    """With five basis vectors a chain of eight is compressed on its way, and still tells that nothing is hidden."""
    bulk = 0.02 * torch.randn(295, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    A = matrix(torch.cat([bulk, torch.tensor([1.0, 0.6, 0.4, 0.3, -0.2], dtype=torch.float64)]), seed)
    result = cl.eigs(A, 1, tol=1e-2, memory=(5 + 3) * 8 * 300, seed=seed)
    assert result.provenance["basis"] == 5
    assert float(result.values[0]) == pytest.approx(1.0, abs=1e-3)
    assert result.products <= 20


@pytest.mark.parametrize("seed", range(10))
def test_residuals_are_right_after_many_chains(seed: int) -> None:
    """Directions given up and taken up again while a chain is compressed: estimates must not lose them."""
    bulk = 0.02 * torch.randn(592, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = matrix(torch.cat([bulk, torch.tensor([1.0, 1, 1, 0.8, 0.7, 0.6, -0.5, -0.4], dtype=torch.float64)]), seed)
    result = cl.eigs(A, 3, tol=1e-3, memory=(9 + 3) * 8 * 600, seed=seed)
    assert bool(result.converged.all())
    torch.testing.assert_close(result.values, torch.ones(3).double(), atol=1e-5, rtol=0)


def test_our_operators_get_vectors_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    H = cl.hessian(small.problem())
    given: list[int] = []
    apply = Curvature._apply

    def watched(self: Curvature, vectors: Tensor, progress: Any) -> Tensor:
        given.append(vectors.untyped_storage().data_ptr())
        return apply(self, vectors, progress)

    monkeypatch.setattr(Curvature, "_apply", watched)
    cl.eigs(H, 1, max_products=6, tol=0.1)
    assert len(set(given[:-1])) == 1  # rows of one basis


def test_sums_with_foreign_operators_are_kept_from_harm() -> None:
    A = matrix(spectra()["cluster"])

    class Rude:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            w = A @ v
            v.fill_(7.0)
            return w

    both = cl.operators.as_operator(Rude()) + A
    both.symmetric = True
    torch.testing.assert_close(cl.eigs(both, 2).values, 2 * cl.eigs(A, 2).values, atol=1e-10, rtol=0)
