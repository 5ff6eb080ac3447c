"""The cost of a profile: one probe over all modules, in gradients, and what of it is what."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import curvlens as cl
from bench.child import serve
from bench.model import FULL, QUICK, gradient, make_batch, make_model
from bench.timing import seconds
from curvlens._evaluation.recordings import Recordings

SAMPLES = 8


def measure(*, quick: bool, repetitions: int = 5) -> dict[str, Any]:
    """Gradients for each probe of a whole profile, and for its steps; all take turns with the gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)  # float32 is announced
    sizes = QUICK if quick else FULL
    model, batch = make_model(sizes), make_batch(sizes)
    problem = cl.Problem(model, batch, cl.losses.CrossEntropy())
    H, recordings = cl.hessian(problem), Recordings(problem._evaluation)  # a profile builds its own
    z = torch.randn(problem.layout.size)
    parts = problem.layout.unflatten(z)
    H @ z
    recordings.known()

    def forms(count: int, bent: int) -> Callable[[], object]:
        return lambda: [recording.forms([parts] * count, bent) for recording in recordings]

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "profile": (lambda: cl.profile(problem, samples=SAMPLES, top=False), SAMPLES),
        "build": (lambda: Recordings(problem._evaluation).known(), 1),
        "product": (lambda: H @ z, 1),
        "probe": (forms(1, 1), 1),
        "tangent": (forms(1, 0), 1),
    }
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for way, _ in ways.values():
        way()
    for _ in range(2 if quick else repetitions):
        for name, (way, count) in ways.items():
            unit = min(seconds(lambda: gradient(model, batch)) for _ in range(2))
            costs[name].append(seconds(way) / count / unit)
    profile = cl.profile(problem, samples=4, top=False)
    return {
        **{name: median(values) for name, values in costs.items()},
        "samples": SAMPLES,
        "rows": len(profile),
        "mismatch": profile.mismatch,
    }


if __name__ == "__main__":
    serve(measure)
