"""How many products a trace takes, and the five largest eigenvalues, by each library's estimators and solvers.

Each has a knob: a number of products or steps, or a tolerance. It gets the cheapest setting of a grid with which it
would have made it, which a user cannot know; estimators that stop by themselves get what they spent, and how often the
result was good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
import torch
from torch import Tensor, nn

import curvlens as cl
from bench.measuring import reason
from bench.model import ends, gpt_hessian, sampled
from bench.tables import Results, Table, absent_table

TRACE_ACCURACY, CONFIDENCE = 0.01, 0.95
SAMPLES = [round(6 * 1.25**i / 6) * 6 for i in range(30)]
K, ACCURACY = 5, 1e-4
TOLERANCES = [10 ** (-i / 2) for i in range(2, 17)]
STEPS = [round(10 * 1.2**i) for i in range(26)]
Estimator = Callable[[Tensor, int, int], float]
"""(matrix, products, seed) → trace."""
Solver = Callable[[Tensor, float, int], tuple[Sequence[float], int]]
"""(matrix, setting, seed) → (five values, products)."""


class Counted:
    """A product with a matrix that counts how often it was taken."""

    def __init__(self, product: Callable[..., Any]) -> None:
        self.product, self.count = product, 0

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self.product(*arguments)


# A matrix as a model for PyHessian, which only knows models


class Quadratic(nn.Module):
    """The loss ½ θᵀ A θ, whose Hessian is A."""

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.A = A
        self.theta = nn.Parameter(torch.ones(len(A), dtype=A.dtype))

    def forward(self, _: Tensor) -> Tensor:
        return 0.5 * self.theta @ (self.A @ self.theta)


def pyhessian(A: Tensor) -> Any:
    """PyHessian's object for a matrix."""
    from pyhessian import hessian

    model = Quadratic(A)
    return hessian(model, lambda outputs, _: outputs, data=(torch.zeros(1), torch.zeros(1)), cuda=False)


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call of PyHessian, and how many products it made."""
    import pyhessian  # noqa: F401 - its name for the module is that of a class inside it

    module: Any = sys.modules["pyhessian.hessian"]
    plain = module.hessian_vector_product
    module.hessian_vector_product = product = Counted(plain)
    try:
        return call(), product.count
    finally:
        module.hessian_vector_product = plain


# Traces


def trace_ours(A: Tensor, budget: int, seed: int) -> float:
    return float(cl.trace(A, budget, seed=seed))


def trace_curvlinops(name: str) -> Estimator:
    def estimate(A: Tensor, budget: int, seed: int) -> float:
        import curvlinops

        torch.manual_seed(seed)
        return float(getattr(curvlinops, name)(A, budget))

    return estimate


def trace_eigenthings(name: str, keyword: str) -> Estimator:
    def estimate(A: Tensor, budget: int, seed: int) -> float:
        import hessian_eigenthings as he

        operator = he.LambdaOperator(lambda v: A @ v, len(A), dtype=A.dtype)
        return float(getattr(he, name)(operator, seed=seed, **{keyword: budget}).estimate)

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "curvlens: trace(samples=…)": trace_ours,
    "curvlinops: xtrace": trace_curvlinops("xtrace"),
    "curvlinops: hutchpp_trace": trace_curvlinops("hutchpp_trace"),
    "curvlinops: hutchinson_trace": trace_curvlinops("hutchinson_trace"),
    "hessian-eigenthings: hutch_plus_plus": trace_eigenthings("hutch_plus_plus", "num_matvecs"),
    "hessian-eigenthings: hutchinson": trace_eigenthings("hutchinson", "num_samples"),
}


def needed(estimator: Estimator, A: Tensor, runs: int) -> dict[str, Any]:
    """The smallest budget that suffices; None if not even as many products as rows do."""
    truth = float(A.trace())
    misses_allowed = int(runs * (1 - CONFIDENCE) + 1e-9)
    for budget in (b for b in SAMPLES if b < len(A)):
        misses = 0
        for seed in range(runs):
            misses += abs(estimator(A, budget, seed) - truth) > TRACE_ACCURACY * abs(truth)
            if misses > misses_allowed:
                break
        else:
            return {"products": budget}
    return {"products": None}


def by_itself(A: Tensor, runs: int) -> dict[str, Any]:
    """Ours to rtol, and PyHessian to its own rule: products on average, and the share of good results."""
    truth = float(A.trace())

    def share(results: list[tuple[float, int]]) -> dict[str, Any]:
        good = mean(abs(value - truth) <= TRACE_ACCURACY * abs(truth) for value, _ in results)
        return {"products": mean(count for _, count in results), "good": good}

    def rtol(seed: int) -> tuple[float, int]:
        estimate = cl.trace(A, rtol=TRACE_ACCURACY, seed=seed)
        return float(estimate), estimate.samples

    def stalls(seed: int) -> tuple[float, int]:
        torch.manual_seed(seed)
        samples, count = counted(lambda: pyhessian(A).trace(maxIter=1000, tol=1e-3))
        return mean(samples), count

    result: dict[str, Any] = {"curvlens: trace(rtol=0.01)": share([rtol(seed) for seed in range(runs)])}
    try:
        result["PyHessian: trace(tol=1e-3)"] = share([stalls(seed) for seed in range(runs)])
    except Exception as error:
        result["PyHessian: trace(tol=1e-3)"] = {"not_run": reason(error)}
    return result


def traces(*, quick: bool) -> dict[str, Any]:
    """By matrix, by estimator: to one percent in 95 of 100 runs."""
    runs = 5 if quick else 40
    return _by_matrix(
        sampled(),
        quick,
        {label: partial(needed, estimator, runs=runs) for label, estimator in ESTIMATORS.items()},
        partial(by_itself, runs=runs),
    )


# Eigenvalues


def eigs_ours(check: bool) -> Solver:
    def solve(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
        result = cl.eigs(A, K, tol=tol, seed=seed, check_copies=check)
        return result.values.tolist(), result.products

    return solve


def eigs_scipy(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
    product = Counted(lambda v: A.numpy() @ v)
    start = np.random.default_rng(seed).standard_normal(len(A))
    operator = sla.LinearOperator(tuple(A.shape), matvec=product, dtype=np.float64)
    values = sla.eigsh(operator, K, which="LA", tol=tol, v0=start, return_eigenvectors=False)
    return values.tolist(), product.count


def eigs_pyhessian(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)  # it draws its vectors in the default dtype
    try:
        (values, _), count = counted(lambda: pyhessian(A).eigenvalues(maxIter=2000, tol=tol, top_n=K))
    finally:
        torch.set_default_dtype(torch.float32)
    return values, count


def eigs_eigenthings(name: str) -> Solver:
    def solve(A: Tensor, setting: float, seed: int) -> tuple[Sequence[float], int]:
        import hessian_eigenthings as he

        product = Counted(lambda v: A @ v)
        operator = he.LambdaOperator(product, len(A), dtype=A.dtype)
        if name == "lanczos":
            result = he.lanczos(operator, k=K, max_iter=int(setting), which="LA", reorthogonalize=True, seed=seed)
        else:
            result = he.deflated_power_iteration(operator, k=K, max_iter=2000, tol=setting, seed=seed)
        return [float(x) for x in result.eigenvalues], product.count

    return solve


SOLVERS: dict[str, tuple[Solver, Sequence[float]]] = {
    "curvlens: eigs": (eigs_ours(True), TOLERANCES),
    "curvlens: eigs(check_copies=False)": (eigs_ours(False), TOLERANCES),
    "scipy: eigsh (also through curvlinops)": (eigs_scipy, TOLERANCES),
    "PyHessian: eigenvalues (power iteration)": (eigs_pyhessian, TOLERANCES),
    "hessian-eigenthings: lanczos": (eigs_eigenthings("lanczos"), STEPS),
    "hessian-eigenthings: deflated_power_iteration": (eigs_eigenthings("power"), TOLERANCES),
}


def cheapest(solver: Solver, grid: Sequence[float], A: Tensor, seeds: int) -> dict[str, Any]:
    """Products of the cheapest setting that is good for all seeds."""
    truth = torch.linalg.eigvalsh(A)[-K:]
    for setting in grid:
        counts = []
        for seed in range(seeds):
            values, count = solver(A, setting, seed)
            counts.append(count)
            if len(values) != K or bool(((torch.tensor(sorted(values)) - truth).abs() > ACCURACY * truth.abs()).any()):
                break
        else:
            return {"products": mean(counts)}
    return {"products": None}


def eigenvalues(*, quick: bool) -> dict[str, Any]:
    """By matrix, by solver: the five largest, each to 1e-4."""
    ways = {
        label: partial(cheapest, solver, grid[:6] if quick else grid, seeds=2 if quick else 5)
        for label, (solver, grid) in SOLVERS.items()
    }
    return _by_matrix(ends(), quick, ways)


def _by_matrix(
    matrices: Mapping[str, Tensor],
    quick: bool,
    ways: Mapping[str, Callable[[Tensor], dict[str, Any]]],
    more: Callable[[Tensor], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, A in {**matrices, "Hessian of a GPT that adds": gpt_hessian(quick)}.items():
        rows: dict[str, Any] = {}
        for label, way in ways.items():
            try:
                rows[label] = way(A)
            except Exception as error:
                rows[label] = {"not_run": reason(error)}
        results[name] = {"rows": len(A), **rows, **more(A)}
    return results


# In the report


def _grid(title: str, data: Results, first: str, notes: list[str]) -> Table:
    """One row a method, one column a matrix."""
    if "not_run" in data:
        return absent_table(title, data)
    methods = [key for key in next(iter(data.values())) if key != "rows"]
    head = [first, *(f"{name} ({column['rows']} rows)" for name, column in data.items())]
    rows = [[method, *(_cell(column[method]) for column in data.values())] for method in methods]
    return Table(title, head, rows, notes)


def _cell(entry: Results) -> str:
    if "not_run" in entry:
        return f"not run: {entry['not_run']}"
    if entry["products"] is None:
        return "more than rows"
    good = f", good in {entry['good']:.0%}" if "good" in entry else ""
    return f"{entry['products']:.0f}{good}"


def traces_table(results: Results) -> Table:
    """By estimator and matrix."""
    notes = [
        "Products for a trace that is right to 1 % in 95 of 100 runs. Rows with a fixed number of products: "
        "the smallest of a grid (6, 12, 18, …, growing by a quarter) with which 38 of 40 seeds were good; a "
        "user cannot know it beforehand. Rows that stop by themselves: products on average, and the share of "
        "good results. “more than rows”: not even that many products suffice, and the dense matrix would be "
        "cheaper."
    ]
    return _grid("Products for a trace at 1 %", results["traces"], "Estimator", notes)


def eigenvalues_table(results: Results) -> Table:
    """By solver and matrix."""
    notes = [
        "Products for the five largest eigenvalues, each to 1e-4, repeated ones as often as they are "
        "repeated: the cheapest setting of each solver (tolerance, or number of steps) with which 5 of 5 "
        "seeds were good. curvlens' count includes one product for the residual of each vector and, in the "
        "first row, the search for hidden copies; the others report no residual from a product. “more than "
        "rows”: no setting was good."
    ]
    return _grid("Products for the five largest eigenvalues at 1e-4", results["eigenvalues"], "Solver", notes)
