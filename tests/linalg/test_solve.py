"""Linear systems against dense solutions, definite and indefinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import curvlens as cl
import small
from spectra import matrix


def rhs(n: int) -> torch.Tensor:
    return small.direction(n, seed=3)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_definite(method: Any) -> None:
    A = matrix(torch.logspace(-3, 0, 100))
    from curvlens.linalg import solve

    solution = solve(A, rhs(100), method=method)
    assert solution.converged
    torch.testing.assert_close(A @ solution.x, rhs(100), atol=1e-6, rtol=0)
    true = float((A @ solution.x - rhs(100)).norm() / rhs(100).norm())
    assert true == pytest.approx(solution.residual, rel=0.01, abs=1e-13)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_indefinite(scale: float) -> None:
    from curvlens.linalg import solve

    A = scale * matrix(torch.cat([torch.linspace(-2, -0.1, 40), torch.linspace(0.1, 3, 60)]).double())
    solution = solve(A, rhs(100))
    assert solution.method == "minres"
    assert solution.converged
    torch.testing.assert_close(solution.x, torch.linalg.solve(A, rhs(100)), atol=1e-5 / scale, rtol=1e-5)
    assert all(b <= a * (1 + 1e-9) for a, b in zip(solution.history[:-1], solution.history[1:], strict=True))


@pytest.mark.full
def test_a_plateau_is_waited_for() -> None:
    """400 eigenvalues of both signs from 1e-4 to 1: hundreds of steps gain nothing, and then it converges."""
    from curvlens.linalg import solve

    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (-4 * torch.rand(400, generator=generator, dtype=torch.float64))
    A = matrix(sizes * (torch.rand(400, generator=generator) - 0.5).sign())
    b = A @ rhs(400)
    solution = solve(A, b, max_products=20_000)
    assert solution.converged
    assert float((A @ solution.x - b).norm() / b.norm()) <= 1e-8
    best = np.minimum.accumulate(solution.history)
    assert (best[100:] > 0.99 * best[:-100]).any()  # stood still for longer than 100 steps


@pytest.mark.parametrize("of", [cl.hessian, cl.ggn])
def test_of_a_problem(of: Any) -> None:
    problem = small.problem()
    operator = of(problem)
    g = problem.gradient()
    solution = operator.solve(g, damping=0.3)
    assert solution.method == ("cg" if operator.psd else "minres")
    dense = operator.dense() + 0.3 * torch.eye(len(g), dtype=torch.float64)
    torch.testing.assert_close(solution.x, torch.linalg.solve(dense, g), atol=1e-7, rtol=1e-6)
    named = operator.solve(problem.layout.unflatten(g), damping=0.3)
    torch.testing.assert_close(
        named.x["unembed.weight"].reshape(-1), solution.x[problem.layout.slices["unembed.weight"]]
    )
    array = operator.solve(g.numpy(), damping=0.3)
    assert isinstance(array.x, np.ndarray)
    again = operator.solve(g, damping=0.3, start=solution.x)
    assert again.products <= 3


def test_what_cannot_be_solved_is_said() -> None:
    from curvlens.linalg import solve

    A = matrix(torch.cat([torch.zeros(50), torch.ones(50)]))
    with pytest.warns(cl.CurvlensWarning, match="outside the range"):
        solution = solve(A, rhs(100))
    assert not solution.converged
    with pytest.warns(cl.CurvlensWarning, match="no positive curvature"):
        solve(matrix(torch.linspace(-2, 1, 30)), rhs(30), method="cg")
    with pytest.warns(cl.CurvlensWarning, match="max_products=5"):
        assert solve(matrix(torch.logspace(-6, 0, 100)), rhs(100), max_products=5).products <= 6


SINGULAR = {
    "half of it zero": torch.cat([torch.zeros(50), torch.ones(50)]),
    "indefinite": torch.cat([torch.linspace(-2, -0.1, 40), torch.zeros(10), torch.linspace(0.1, 3, 50)]),
    "rank one": torch.cat([torch.zeros(99), torch.ones(1)]),
    "nearly singular": torch.cat([torch.full((1,), 1e-14), torch.linspace(1, 2, 99)]),
}


@pytest.mark.parametrize("inside", [True, False], ids=["random", "kernel"])
@pytest.mark.parametrize("name", SINGULAR)
def test_inconsistent_systems_end_at_least_squares(name: str, inside: bool) -> None:
    """x grew along the kernel by 1/eps, and with it the residual, to 7e14."""
    from curvlens.linalg import solve

    A = matrix(SINGULAR[name].double())
    values, vectors = torch.linalg.eigh(A)
    b = rhs(100) if inside else vectors[:, values.abs().argmin()]
    with pytest.warns(cl.CurvlensWarning):
        solution = solve(A, b, method="minres")
    assert solution.status == "inconsistent"
    true = float((A @ solution.x - b).norm() / b.norm())
    # of the nearly singular one, x is 1e14, and A x is rounded in the second digit
    rounding = 4 * torch.finfo(torch.float64).eps * float(values.abs().max() * solution.x.norm() / b.norm())
    assert solution.residual == pytest.approx(true, rel=1e-6, abs=rounding)
    assert solution.residual <= 1.0
    if name != "nearly singular":  # which has no kernel
        kernel = vectors[:, values.abs() < 1e-12]
        assert solution.residual <= 1.01 * float((kernel.T @ b).norm() / b.norm())
        assert float(solution.x.norm()) < 100


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_beside_a_large_kernel(seed: int) -> None:
    """Half of the space is kernel, and b has as much there: the recurrence alone ends up to 2 % above the minimum."""
    from curvlens.linalg import solve

    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(26, 26, dtype=torch.float64, generator=generator)
    A = A + A.T
    A[:, 13:] = A[13:] = 0
    b = torch.randn(26, dtype=torch.float64, generator=generator)
    with pytest.warns(cl.CurvlensWarning, match="least-squares solution"):
        solution = solve(A, b)
    assert solution.status == "inconsistent"
    best = torch.linalg.pinv(A) @ b
    assert solution.residual == pytest.approx(float((b - A @ best).norm() / b.norm()), rel=1e-12)
    torch.testing.assert_close(A @ solution.x, A @ best, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The operator is in bfloat16")
@pytest.mark.parametrize("condition", [4, 10, 30])
def test_half_precision_is_not_inconsistent(condition: float) -> None:
    from curvlens.linalg import solve

    A = torch.diag(torch.linspace(1, condition, 40)).bfloat16()
    assert solve(A, torch.ones(40)).converged


def test_stagnation_keeps_the_best() -> None:
    from curvlens.linalg import solve

    b = rhs(200)
    methods: tuple[Any, ...] = ("cg", "minres")
    for A, rtol, good in (
        (matrix(torch.linspace(0.5, 1, 200)), 1e-16, 1e-14),
        (matrix(torch.linspace(0.5, 1, 200)).float(), 1e-7, 1e-5),
        (matrix(torch.logspace(-2, 0, 200)).float(), 1e-6, 1e-3),
    ):
        for method in methods:
            with pytest.warns(cl.CurvlensWarning):
                assert solve(A, b, rtol=rtol, method=method).residual < good
    singular = matrix(torch.cat([torch.zeros(50), torch.ones(50)]))
    with pytest.warns(cl.CurvlensWarning):
        assert solve(singular, rhs(100), method="cg").residual <= 1.0
    with pytest.warns(cl.CurvlensWarning):
        solution = solve(singular, rhs(100))
    outside = singular @ rhs(100) - rhs(100)
    assert solution.residual == pytest.approx(float(outside.norm() / rhs(100).norm()), rel=0.02)


@pytest.mark.parametrize("unit", [1e-200, 1e-30, 1e100])
def test_units_of_the_right_side(unit: float) -> None:
    from curvlens.linalg import solve

    A = matrix(torch.linspace(0.5, 1, 50))
    solution = solve(A, rhs(50) * unit)
    assert solution.converged
    torch.testing.assert_close(solution.x / unit, torch.linalg.solve(A, rhs(50)), atol=1e-6, rtol=0)


def test_zero() -> None:
    from curvlens.linalg import solve

    solution = solve(torch.eye(4, dtype=torch.float64), torch.zeros(4))
    assert solution.converged
    assert not bool(solution.x.any())


def test_low_precision() -> None:
    from curvlens.linalg import solve

    A = matrix(torch.linspace(0.5, 1.5, 60)).float()
    with pytest.warns(cl.CurvlensWarning, match="relative error"):
        solution = solve(A, rhs(60))
    assert solution.converged


@pytest.mark.parametrize(
    ("b", "options", "message"),
    [
        (torch.ones(3), {}, "b has shape"),
        (torch.full((4,), float("nan")), {}, "b has entries"),
        (torch.ones(4), {"rtol": 0}, "rtol=0"),
        (torch.ones(4), {"damping": float("inf")}, "damping=inf"),
        (torch.ones(4), {"method": "lu"}, "method='lu'"),
        (torch.ones(4), {"max_products": 0}, "max_products=0"),
    ],
)
def test_bad_input(b: Any, options: dict[str, Any], message: str) -> None:
    from curvlens.linalg import solve

    with pytest.raises(cl.CurvlensError, match=message):
        solve(torch.eye(4, dtype=torch.float64), b, **options)
    with pytest.raises(cl.CurvlensError, match="not symmetric"):
        solve(torch.triu(torch.ones(4, 4, dtype=torch.float64)), torch.ones(4))
