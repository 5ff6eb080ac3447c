"""Announced and real memory of an eigenvalue search whose basis is filled to the brim."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import Any

import torch

import curvlens as cl
from bench.child import serve
from bench.memory import _CLEAR, _kilobytes
from bench.methods import reason
from bench.model import FULL, QUICK, make_batch, make_model

BUDGETS = ("1500MiB",)
LONG = replace(FULL, batch=1, context=32)
"""Vectors of the full length, and products that cost little."""


def measure(*, quick: bool, budget: str) -> dict[str, Any]:
    """MiB announced by the result, and the peak above what the process held after a product."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    sizes = QUICK if quick else LONG
    model, batch = make_model(sizes), make_batch(sizes)
    H = cl.hessian(cl.Problem(model, [batch], cl.losses.CrossEntropy()))
    v = torch.randn(H.shape[1])
    H @ v
    H @ v
    peak_of_product = _kilobytes("VmHWM")
    gc.collect()
    try:
        _CLEAR.write_text("5")
    except OSError as error:
        return {"not_run": reason(error)}
    before = _kilobytes("VmRSS")
    products = 20 if quick else 50
    result = cl.eigs(H, 5, tol=1e-7, memory=budget, max_products=products)
    peak = _kilobytes("VmHWM")
    # What a product needs beside the kept graph comes on top of what linalg holds.
    product = max(peak_of_product - before, 0)
    return {
        "announced": result.memory / 2**20,
        "real": (peak - before - product) / 1024,
        "product": product / 1024,
        "basis": result.provenance["basis"],
        "products": result.products,
    }


if __name__ == "__main__":
    serve(measure)
