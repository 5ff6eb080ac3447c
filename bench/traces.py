"""How many products a trace takes: to one percent in 95 of 100 runs, by each library's estimators.

Estimators with a fixed number of products get the smallest number of a grid with which they would have made it, which
a user cannot know; those that stop by themselves get what they spent, and how often the result was good.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import curvlens as cl
from bench.child import serve
from bench.methods import reason
from bench.quadratic import counted, pyhessian
from bench.spectra import gpt_hessian, sampled

ACCURACY, CONFIDENCE = 0.01, 0.95
GRID = [round(6 * 1.25**i / 6) * 6 for i in range(30)]
Estimator = Callable[[Tensor, int, int], float]
"""(matrix, products, seed) → trace."""


def ours(A: Tensor, budget: int, seed: int) -> float:
    return float(cl.trace(A, budget, seed=seed))


def curvlinops(name: str) -> Estimator:
    def estimate(A: Tensor, budget: int, seed: int) -> float:
        import curvlinops

        torch.manual_seed(seed)
        return float(getattr(curvlinops, name)(A, budget))

    return estimate


def eigenthings(name: str, keyword: str) -> Estimator:
    def estimate(A: Tensor, budget: int, seed: int) -> float:
        import hessian_eigenthings as he

        operator = he.LambdaOperator(lambda v: A @ v, len(A), dtype=A.dtype)
        return float(getattr(he, name)(operator, seed=seed, **{keyword: budget}).estimate)

    return estimate


FIXED: dict[str, Estimator] = {
    "curvlens: trace(samples=…)": ours,
    "curvlinops: xtrace": curvlinops("xtrace"),
    "curvlinops: hutchpp_trace": curvlinops("hutchpp_trace"),
    "curvlinops: hutchinson_trace": curvlinops("hutchinson_trace"),
    "hessian-eigenthings: hutch_plus_plus": eigenthings("hutch_plus_plus", "num_matvecs"),
    "hessian-eigenthings: hutchinson": eigenthings("hutchinson", "num_samples"),
}


def needed(estimator: Estimator, A: Tensor, runs: int) -> dict[str, Any]:
    """The smallest budget that suffices; None if not even as many products as rows do."""
    truth = float(A.trace())
    misses_allowed = int(runs * (1 - CONFIDENCE) + 1e-9)
    for budget in (b for b in GRID if b < len(A)):
        misses = 0
        for seed in range(runs):
            misses += abs(estimator(A, budget, seed) - truth) > ACCURACY * abs(truth)
            if misses > misses_allowed:
                break
        else:
            return {"products": budget}
    return {"products": None}


def by_itself(A: Tensor, runs: int) -> dict[str, Any]:
    """Ours to rtol, and PyHessian to its own rule: products on average, and the share of good results."""
    truth = float(A.trace())

    def share(results: list[tuple[float, int]]) -> dict[str, Any]:
        good = mean(abs(value - truth) <= ACCURACY * abs(truth) for value, _ in results)
        return {"products": mean(count for _, count in results), "good": good}

    def rtol(seed: int) -> tuple[float, int]:
        estimate = cl.trace(A, rtol=ACCURACY, seed=seed)
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


def measure(*, quick: bool) -> dict[str, Any]:
    """By matrix, by estimator."""
    matrices = {**sampled(), "Hessian of a GPT that adds": gpt_hessian(quick)}
    results: dict[str, Any] = {}
    for name, A in matrices.items():
        runs = 5 if quick else 40
        rows: dict[str, Any] = {}
        for label, estimator in FIXED.items():
            try:
                rows[label] = needed(estimator, A, runs)
            except Exception as error:
                rows[label] = {"not_run": reason(error)}
        results[name] = {"rows": len(A), **rows, **by_itself(A, runs)}
    return results


if __name__ == "__main__":
    serve(measure)
