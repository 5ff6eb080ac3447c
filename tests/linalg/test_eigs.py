"""Eigenvalues against dense ``eigh``: values, multiplicities, vectors, residuals; and what happens on bad input."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

import curvlens as cl
import small
from cases import CASES as MODELS
from spectra import matrix, spectra, tiny

MATRICES = {**spectra(), **tiny()}


def expected(A: Tensor, k: int, ends: str) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(A)
    n = len(values)
    if ends == "magnitude":
        return values[values.abs().argsort(descending=True)[:k]].abs().sort().values
    if ends == "both":
        return values if 2 * k >= n else torch.cat([values[:k], values[n - k :]])
    return values[n - k :] if ends == "largest" else values[:k]


def check(A: Tensor, result: Any, k: int, ends: str, tol: float = 1e-8) -> None:
    norm = float(torch.linalg.eigvalsh(A).abs().max())
    truth = expected(A, k, ends)
    values = result.values.abs().sort().values if ends == "magnitude" else result.values
    assert values.shape == truth.shape
    assert float((values - truth).abs().max()) <= tol * norm
    assert bool((result.values.diff() >= 0).all())
    X = result.vectors
    torch.testing.assert_close(X.T @ X, torch.eye(len(values), dtype=X.dtype), atol=1e-12, rtol=0)
    true = (A @ X - X * result.values).norm(dim=0)
    assert bool((true <= 2 * result.residuals + 1e-15 * norm).all())
    assert bool(result.converged.all()), result.note


@pytest.mark.parametrize("ends", ["largest", "smallest", "both", "magnitude"])
@pytest.mark.parametrize("name", MATRICES)
def test_against_dense(name: str, ends: Any) -> None:
    A = matrix(MATRICES[name])
    k = min(5, len(A))
    check(A, cl.eigs(A, k, ends), k, ends)


@pytest.mark.parametrize("ends", ["largest", "smallest", "both", "magnitude"])
@pytest.mark.parametrize("name", ["cluster", "plus and minus", "triples over zeros", "triples at both ends"])
def test_restarts_change_nothing(name: str, ends: Any) -> None:
    A = matrix(MATRICES[name])
    bytes_of_a_vector = 8 * len(A)
    result = cl.eigs(A, 5, ends, memory=(24 + 2 * 5 + 10 + 4) * bytes_of_a_vector, max_products=20_000)
    assert result.provenance["basis"] < 50
    check(A, result, 5, ends)


@pytest.mark.parametrize("seed", range(10))
def test_multiplicities_with_any_seed(seed: int) -> None:
    A = matrix(MATRICES["triples over a bulk"], seed)
    result = cl.eigs(A, 6, seed=seed)
    torch.testing.assert_close(result.values, torch.tensor([2.0, 2, 2, 3, 3, 3]).double(), atol=1e-8, rtol=0)
    alone = cl.eigs(A, 6, seed=seed, check_copies=False)
    assert alone.products < result.products


@pytest.mark.parametrize("of", [cl.hessian, cl.ggn, cl.functional])
def test_reference_gpt(of: Any) -> None:
    operator = of(small.problem())
    A = operator.dense()
    A = (A + A.T) / 2
    check(A, cl.eigs(operator, 4, "both"), 4, "both")


@pytest.mark.full
def test_hugging_face_gpt2() -> None:
    case = next(case for case in MODELS if case.name == "gpt2")
    operator = cl.hessian(cl.Problem(case.model(), list(case.batches), case.loss))
    A = operator.dense()
    check((A + A.T) / 2, cl.eigs(operator, 5, "both"), 5, "both")


def test_the_same_from_every_library() -> None:
    A = matrix(MATRICES["cluster"])
    reference = cl.eigs(A, 3).values

    class Foreign:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            return A @ v

    for other in (A.numpy(), sla.aslinearoperator(A.numpy()), scipy.sparse.csr_array(A.numpy()), Foreign()):
        torch.testing.assert_close(cl.eigs(other, 3).values, reference, atol=1e-12, rtol=0)


def test_mass_of_the_vectors() -> None:
    problem = small.problem()
    result = cl.eigs(cl.hessian(problem), 3)
    mass = result.mass("parameter")
    assert tuple(mass) == problem.layout.names
    torch.testing.assert_close(torch.tensor(list(mass.values()), dtype=torch.float64).sum(0), torch.ones(3).double())
    name = problem.layout.names[0]
    torch.testing.assert_close(
        torch.tensor(mass[name], dtype=torch.float64), result.vectors[problem.layout.slices[name]].square().sum(0)
    )


def test_warm_start_saves_products() -> None:
    A = matrix(MATRICES["condition 1e12"].sqrt().sqrt())
    cold = cl.eigs(A, 4, check_copies=False)
    near = A + 1e-6 * matrix(torch.linspace(-1, 1, len(A)), seed=3)
    again = cl.eigs(near, 4, check_copies=False)
    warm = cl.eigs(near, 4, start=cold, check_copies=False)
    torch.testing.assert_close(warm.values, again.values, atol=1e-10, rtol=0)
    assert warm.products < again.products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_announced_and_honest(dtype: torch.dtype) -> None:
    A = matrix(torch.cat([torch.linspace(0, 1, 97), torch.tensor([2.0, 3.0, 4.0])])).to(dtype)
    with pytest.warns(cl.CurvlensWarning, match="relative error"):
        result = cl.eigs(A, 3)
    truth = torch.linalg.eigvalsh(A.double())[-3:]
    assert result.values.dtype == result.residuals.dtype == torch.float64
    assert float((result.values - truth).abs().max()) <= {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


@pytest.mark.parametrize("store", ["cpu", "file"])
def test_the_basis_may_live_elsewhere(store: str, tmp_path: Path) -> None:
    A = matrix(MATRICES["triples over a bulk"])
    result = cl.eigs(A, 4, store=tmp_path if store == "file" else store)
    torch.testing.assert_close(result.values, cl.eigs(A, 4).values, atol=1e-12, rtol=0)
    assert not list(tmp_path.iterdir())


def test_memory_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    A = matrix(MATRICES["cluster"])
    with caplog.at_level("INFO", logger="curvlens"):
        result = cl.eigs(A, 3, memory="100kB")
    assert "a basis of" in caplog.text
    assert result.memory <= 100_000
    assert result.memory >= result.provenance["basis"] * len(A) * 8


def cycle(n: int) -> Tensor:
    """The Laplacian of a cycle: every eigenvalue twice, and densest at the ends."""
    L = 2 * torch.eye(n, dtype=torch.float64)
    L -= torch.roll(torch.eye(n, dtype=torch.float64), 1, 0) + torch.roll(torch.eye(n, dtype=torch.float64), -1, 0)
    return L


@pytest.mark.parametrize("ends", ["largest", "smallest"])
@pytest.mark.parametrize("seed", range(8))
def test_pairs_at_a_dense_end(seed: int, ends: Any) -> None:
    A = cycle(158)
    check(A, cl.eigs(A, 3, ends, seed=seed), 3, ends)


def test_a_warm_start_does_not_hide_what_overtook() -> None:
    bulk = torch.linspace(0, 1, 494, dtype=torch.float64)
    rest = torch.tensor([1.04, 1.03, 1.02, 1.01], dtype=torch.float64)
    before, after = (matrix(torch.cat([bulk, torch.tensor([x], dtype=torch.float64), rest])) for x in (0.5, 1.05))
    for seed in range(5):
        result = cl.eigs(after, 1, start=cl.eigs(before, 1, seed=seed), seed=seed)
        assert float(result.values[0]) == pytest.approx(1.05, abs=1e-9)


@pytest.mark.parametrize("seed", range(100, 112))
def test_copies_with_restarts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(2, 11, 2)
    values = np.concatenate([generator.random(200 - counts.sum()), [2.0] * counts[0], [2.3] * counts[1]])
    A = matrix(torch.from_numpy(values), seed)
    k = min(6, int(counts.sum()))
    result = cl.eigs(A, k, memory=(2 * 6 + 20) * 1600, seed=seed, max_products=2000)
    check(A, result, k, "largest")


@pytest.mark.parametrize("stop", range(30, 60))
def test_interrupted_anywhere_it_is_honest(stop: int) -> None:
    A = matrix(torch.linspace(0, 1, 300).double() ** 0.5)
    calls = 0

    class Op:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise KeyboardInterrupt
            return A @ v

    with pytest.warns(cl.CurvlensWarning, match="interrupted"):
        result = cl.eigs(Op(), 3, memory=40 * 300 * 8, tol=1e-9)
    true = (A @ result.vectors - result.vectors * result.values).norm(dim=0)
    assert bool((true <= 2 * result.residuals + 1e-12).all())


def test_few_products_are_said() -> None:
    with pytest.warns(cl.CurvlensWarning, match="did not converge"):
        result = cl.eigs(torch.eye(60, dtype=torch.float64), 5, max_products=1)
    assert len(result) < 5
    with pytest.warns(cl.CurvlensWarning, match="did not converge"):
        assert cl.eigs(matrix(MATRICES["cluster"]), 5, max_products=12).products <= 12


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scales_out_of_range(scale: float) -> None:
    A = matrix(MATRICES["cluster"]) * scale
    functions: list[Any] = [cl.eigs, cl.density, cl.trace, cl.frobenius]
    for function in functions:
        with pytest.raises(cl.CurvlensError, match="Scale the operator"):
            function(A)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_scales_in_range(scale: float) -> None:
    A = matrix(MATRICES["triples over a bulk"]) * scale
    check(A, cl.eigs(A, 6), 6, "largest")


def test_results_carry_no_graph() -> None:
    A = matrix(MATRICES["cluster"]).requires_grad_()
    result = cl.eigs(A, 2)
    assert not result.vectors.requires_grad
    assert not result.values.requires_grad


@pytest.mark.parametrize("tol", [0.1, 0.03, 0.01])
@pytest.mark.parametrize("seed", range(6))
def test_loose_tolerances_do_not_stall(tol: float, seed: int) -> None:
    """A direction given up for the search for copies must not block the end of the search for good."""
    values = torch.cat([torch.linspace(0, 1, 495), torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])]).double()
    result = cl.eigs(matrix(values), 5, tol=tol, seed=seed)
    assert result.products < 80
    assert bool(result.converged.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_basis_in_a_lower_dtype(dtype: torch.dtype) -> None:
    A = matrix(torch.cat([torch.linspace(0, 1, 97), torch.tensor([2.0, 3.0, 4.0])]).double())
    result = cl.eigs(A, 3, store_dtype=dtype)
    truth = torch.linalg.eigvalsh(A)[-3:]
    # The nearest eigenvalues are 1 apart: a vector with a residual of r has a Rayleigh quotient that is off by r².
    assert bool(((result.values - truth).abs() <= 1.1 * result.residuals**2 + 1e-14).all())
    true = (A @ result.vectors - result.vectors * result.values).norm(dim=0)
    assert bool((true <= 2 * result.residuals).all())


def test_what_is_not_there_yet_is_said() -> None:
    A = matrix(MATRICES["condition 1e12"])
    with pytest.warns(cl.CurvlensWarning, match="did not converge"):
        result = cl.eigs(A, 3, "smallest", max_products=20)
    assert not bool(result.converged.all())
    assert "max_products=20" in result.note
    true = (A @ result.vectors - result.vectors * result.values).norm(dim=0)
    assert bool((true <= 2 * result.residuals).all())


def test_interrupted() -> None:
    A = matrix(MATRICES["condition 1e12"])
    calls = 0

    class Slow:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 30:
                signal.raise_signal(signal.SIGINT)
            return A @ v

    with pytest.warns(cl.CurvlensWarning, match="interrupted"):
        result = cl.eigs(Slow(), 3, "smallest")
    assert calls == 30
    assert len(result) == 3


# Bad input


def test_not_symmetric() -> None:
    A = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(cl.CurvlensError, match="is not symmetric"):
        cl.eigs(A)
    nearly = A + A.T
    nearly[0, 1] += 1e-14  # rounding is not asymmetry
    cl.eigs(nearly)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_located(bad: float) -> None:
    A = matrix(MATRICES["cluster"])
    calls = 0

    class Breaks:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            w = A @ v
            if calls == 7:
                w[11] = bad
            return w

    with pytest.raises(cl.CurvlensError, match=r"Product 7 .* the first at 11"):
        cl.eigs(Breaks())


def test_an_operator_that_writes_to_its_argument() -> None:
    A = matrix(MATRICES["cluster"])
    buffer = torch.empty(len(A), dtype=torch.float64)

    class Rude:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            torch.mv(A, v.clone(), out=buffer)
            v.fill_(7.0)
            return buffer

    check(A, cl.eigs(Rude(), 5), 5, "largest")
    polite = sla.LinearOperator(A.shape, matvec=lambda v: np.multiply(A.numpy() @ v, 1, out=v), dtype=np.float64)
    check(A, cl.eigs(polite, 5), 5, "largest")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 301}, "k=301 eigenvalues asked of"),
        ({"ends": "top"}, "ends='top'"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"max_products": 0}, "max_products=0"),
        ({"seed": -1}, "seed=-1"),
        ({"start": torch.ones(3)}, "start is shape"),
        ({"start": torch.full((300,), float("nan"))}, "start has entries"),
        ({"memory": "10kB"}, "at least"),
        ({"store": "no/such/folder"}, "expected 'device', 'cpu' or an existing folder"),
        ({"store_dtype": torch.int32}, "store_dtype"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    A = matrix(MATRICES["cluster"])
    with pytest.raises(cl.CurvlensError, match=message):
        cl.eigs(A, **options)


def test_what_is_no_matrix() -> None:
    for bad in (torch.ones(3), "H", torch.ones(3, 4), torch.ones(0, 0), torch.ones(3, 3, dtype=torch.complex64)):
        with pytest.raises(cl.CurvlensError):
            cl.eigs(bad)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    A = matrix(MATRICES["cluster"])

    def no_space(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    with pytest.raises(cl.CurvlensError, match="No space left on device"):
        cl.eigs(A, store=tmp_path)
    assert not list(tmp_path.iterdir())
