"""The numbers that `scaling` compares: losses, ends and moments of the spectrum, conditioning, with errors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from curvlens.dynamics.data_size import deviations
from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError
from curvlens.linalg import density, eigs, frobenius, trace
from curvlens.linalg.counted import whole
from curvlens.operators import ggn, hessian
from curvlens.problem import Problem

GROUPS = 64
"""The most parts of a test set whose spread gives the error of its loss."""


@dataclass(frozen=True)
class Settings:
    """How it is measured."""

    top: int
    """The condition number is that of G in the subspace of its so many largest eigenvalues."""
    floor: float
    """Those of them below this share of the largest are left out."""
    products: int
    """Samples for the trace, and for the Frobenius norm."""
    probes: int
    """Lanczos runs for the negative mass."""
    lanczos: int
    """Products of each."""
    dense: int
    """With so many parameters or fewer all eigenvalues of H are computed."""

    def __post_init__(self) -> None:
        least = {"top": 2, "products": 2, "probes": 2, "lanczos": 10, "dense": 0}
        for name, value in asdict(self).items():
            if name == "floor":
                if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
                    raise CurvlensError(f"floor={value!r}, expected a share of the largest eigenvalue, such as 1e-6.")
            elif not whole(value) or value < least[name]:
                raise CurvlensError(f"{name}={value!r}, expected a whole number, {least[name]} or more.")


COUNTS = ("parameters", "kept")
"""Numbers without an error."""
MEASURED = (
    *("train_loss", "test_loss", "gradient_norm", "lambda_max", "lambda_min", "trace", "frobenius"),
    *("effective_rank", "condition", "negative_mass"),
)
"""Numbers with an error."""


def measure(problem: Problem, test: Problem | None, how: Settings, seed: int) -> dict[str, dict[str, float]]:
    """All numbers of a problem, and their errors."""
    value, error = dict.fromkeys(COUNTS + MEASURED, math.nan), dict.fromkeys(MEASURED, math.nan)

    def note(name: str, number: Any, uncertain: Any = 0.0) -> None:
        value[name], error[name] = float(number), float(uncertain)

    H, n = hessian(problem), problem.layout.size
    value["parameters"] = float(n)
    note("train_loss", problem.loss())
    note("gradient_norm", problem.gradient().double().norm())
    if test is not None:
        note("test_loss", test.loss(), _error_of_loss(test))
    spectrum = density(H, probes=how.probes, steps=how.lanczos, seed=seed, exact=n <= how.dense or None)
    mass = spectrum.negative_mass()
    note("negative_mass", mass, mass.stderr)
    if spectrum.exact:
        values = spectrum.nodes
        note("lambda_max", values[-1])
        note("lambda_min", values[0])
        note("trace", values.sum())
        note("frobenius", values.norm())
    else:
        ends = eigs(H, 1, "both", seed=seed)
        note("lambda_max", ends.values[-1], ends.residuals[-1])
        note("lambda_min", ends.values[0], ends.residuals[0])
        first, second = trace(H, how.products, seed=seed), frobenius(H, how.products, seed=seed)
        note("trace", first, first.stderr)
        note("frobenius", second, second.stderr)
    t, F = value["trace"], value["frobenius"]
    if F > 0:  # the two share their probes: their errors are added, not their squares
        uncertain = 2 * abs(t) / F**2 * error["trace"] + 2 * t**2 / F**3 * error["frobenius"]
        note("effective_rank", t**2 / F**2, uncertain)
    value["kept"], *condition = _condition(problem, how, seed)
    note("condition", *condition)
    return {"values": value, "errors": error}


def nothing() -> dict[str, dict[str, float]]:
    """The numbers of a model whose training ended in a loss that is not finite."""
    return {"values": dict.fromkeys(COUNTS + MEASURED, math.nan), "errors": dict.fromkeys(MEASURED, math.nan)}


def _condition(problem: Problem, how: Settings, seed: int) -> tuple[float, float, float]:
    """λ₁/λ_k of G over the first k of its eigenvalues: k, the quotient, its error."""
    found = eigs(ggn(problem), min(how.top, problem.layout.size), seed=seed)
    values, residuals = found.values.flip(0), found.residuals.flip(0)
    kept = int((values > how.floor * values[0]).sum()) if values[0] > 0 else 0
    if not kept:
        return 0.0, math.nan, math.nan
    quotient = float(values[0] / values[kept - 1])
    relative = float(residuals[0] / values[0] + residuals[kept - 1] / values[kept - 1]) if kept > 1 else 0.0
    return float(kept), quotient, quotient * relative


def _error_of_loss(problem: Problem) -> float:
    """The standard error of a loss as a mean over samples drawn from a larger set; NaN if it has one sample."""
    samples = Separated(problem, 1)
    if samples.name == "sample" and samples.count > GROUPS:
        samples = Separated(problem, math.ceil(samples.count / GROUPS))
    if samples.count < 2:
        return math.nan
    e = deviations(samples, frozenset(range(samples.count)), None)
    return float(e.std() / torch.tensor(samples.count, dtype=torch.float64).sqrt())
