"""How many products the five largest eigenvalues take, each to 1e-4, by each library's solvers.

Every solver has a knob, a tolerance or a number of steps; it gets the cheapest setting of a grid with which all seeds
were good, which a user cannot know beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

import curvlens as cl
from bench.child import serve
from bench.methods import reason
from bench.quadratic import counted, pyhessian
from bench.spectra import ends, gpt_hessian

K, ACCURACY = 5, 1e-4
TOLERANCES = [10 ** (-i / 2) for i in range(2, 17)]
STEPS = [round(10 * 1.2**i) for i in range(26)]
Solver = Callable[[Tensor, float, int], tuple[Sequence[float], int]]
"""(matrix, setting, seed) → (five values, products)."""


def ours(check: bool) -> Solver:
    def solve(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
        result = cl.eigs(A, K, tol=tol, seed=seed, check_copies=check)
        return result.values.tolist(), result.products

    return solve


def eigsh(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
    count = 0

    def product(v: Any) -> Any:
        nonlocal count
        count += 1
        return A.numpy() @ v

    start = np.random.default_rng(seed).standard_normal(len(A))
    operator = sla.LinearOperator(tuple(A.shape), matvec=product, dtype=np.float64)
    return sla.eigsh(operator, K, which="LA", tol=tol, v0=start, return_eigenvectors=False).tolist(), count


def power_pyhessian(A: Tensor, tol: float, seed: int) -> tuple[Sequence[float], int]:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)  # it draws its vectors in the default dtype
    try:
        (values, _), count = counted(lambda: pyhessian(A).eigenvalues(maxIter=2000, tol=tol, top_n=K))
    finally:
        torch.set_default_dtype(torch.float32)
    return values, count


def eigenthings(name: str) -> Solver:
    def solve(A: Tensor, setting: float, seed: int) -> tuple[Sequence[float], int]:
        import hessian_eigenthings as he

        count = 0

        def product(v: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return A @ v

        operator = he.LambdaOperator(product, len(A), dtype=A.dtype)
        if name == "lanczos":
            result = he.lanczos(operator, k=K, max_iter=int(setting), which="LA", reorthogonalize=True, seed=seed)
        else:
            result = he.deflated_power_iteration(operator, k=K, max_iter=2000, tol=setting, seed=seed)
        return [float(x) for x in result.eigenvalues], count

    return solve


SOLVERS: dict[str, tuple[Solver, Sequence[float]]] = {
    "curvlens: eigs": (ours(True), TOLERANCES),
    "curvlens: eigs(check_copies=False)": (ours(False), TOLERANCES),
    "scipy: eigsh (also through curvlinops)": (eigsh, TOLERANCES),
    "PyHessian: eigenvalues (power iteration)": (power_pyhessian, TOLERANCES),
    "hessian-eigenthings: lanczos": (eigenthings("lanczos"), STEPS),
    "hessian-eigenthings: deflated_power_iteration": (eigenthings("power"), TOLERANCES),
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


def measure(*, quick: bool) -> dict[str, Any]:
    """By matrix, by solver."""
    results: dict[str, Any] = {}
    for name, A in {**ends(), "Hessian of a GPT that adds": gpt_hessian(quick)}.items():
        rows: dict[str, Any] = {}
        for label, (solver, grid) in SOLVERS.items():
            try:
                rows[label] = cheapest(solver, grid[:6] if quick else grid, A, 2 if quick else 5)
            except Exception as error:
                rows[label] = {"not_run": reason(error)}
        results[name] = {"rows": len(A), **rows}
    return results


if __name__ == "__main__":
    serve(measure)
