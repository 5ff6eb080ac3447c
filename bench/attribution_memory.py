"""Peak memory of a profile and of one product with H, each in a process of its own."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch

import curvlens as cl
from bench.attribution import SAMPLES
from bench.child import serve
from bench.memory import peak_reset, peak_since
from bench.model import FULL, QUICK, SMALL, gradient, make_batch, make_model


def _use(problem: cl.Problem, key: str) -> None:
    if key == "profile":
        cl.profile(problem, samples=SAMPLES, top=False)
    else:
        cl.hessian(problem) @ torch.zeros(problem.layout.size)


def measure(*, quick: bool, key: str) -> dict[str, Any]:
    """MiB above what the process held with model, data and one gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    loss, sizes = cl.losses.CrossEntropy(), QUICK if quick else FULL
    _use(cl.Problem(make_model(SMALL), make_batch(SMALL), loss), key)  # kernels and imports are no cost of it
    model, batch = make_model(sizes), make_batch(sizes)
    gradient(model, batch)
    problem = cl.Problem(model, batch, loss)
    gc.collect()
    before = peak_reset()
    _use(problem, key)
    return {"megabytes": peak_since(before)}


if __name__ == "__main__":
    serve(measure)
