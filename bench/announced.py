"""Announced and real memory of an eigenvalue search whose basis is filled to the brim."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import Any

import curvlens as cl
from bench.child import serve
from bench.memory import _CLEAR, _kilobytes
from bench.methods import reason
from bench.model import FULL, QUICK, SMALL, make_batch, make_model

BUDGETS = ("1500MiB",)
LONG = replace(FULL, batch=1, context=32)
"""Vectors of the full length, and products that cost little."""


def measure(*, quick: bool, budget: str) -> dict[str, Any]:
    """MiB announced by the result, and the peak above what the process held after a gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    sizes = QUICK if quick else LONG
    warm = cl.hessian(cl.Problem(make_model(SMALL), [make_batch(SMALL)], cl.losses.CrossEntropy()))
    cl.eigs(warm, 1, max_products=3)  # what libraries load at their first use is no cost of a search
    model, batch = make_model(sizes), make_batch(sizes)
    problem = cl.Problem(model, [batch], cl.losses.CrossEntropy())
    problem.gradient()
    gc.collect()
    try:
        _CLEAR.write_text("5")
    except OSError as error:
        return {"not_run": reason(error)}
    before = _kilobytes("VmRSS")
    products = 20 if quick else 50
    result = cl.eigs(cl.hessian(problem), 5, tol=1e-7, memory=budget, max_products=products)
    return {
        "announced": result.memory / 2**20,
        "real": (_kilobytes("VmHWM") - before) / 1024,
        "basis": result.provenance["basis"],
        "products": result.products,
    }


if __name__ == "__main__":
    serve(measure)
