"""Trace at 5 % and largest eigenvalue at 1 % of G for each of 36 weight matrices: ours, and a peer's loop over them.

The peer gets the same stopping rules on its own products: Hutchinson's estimator until the 95 % interval is within
5 %, and scipy's ``eigsh`` with the tolerance that ours has, both on curvlinops' operator of one parameter at a time.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import scipy.sparse.linalg as sla
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.block_traces import ACCURACY, hutchinson
from bench.child import serve
from bench.methods import reason
from bench.model import FULL, QUICK, Batch, TokenLoss, block_names, gradient, make_batch, make_model
from bench.timing import seconds

LONG = replace(FULL, batch=1, context=32)
TOLERANCE = 0.01
Table = dict[str, dict[str, float]]


def ours(model: nn.Module, batch: Batch, names: list[str]) -> Table:
    """All traces from the same backward passes; eigenvalues block by block on one kept graph."""
    G = cl.ggn(cl.Problem(model, [batch], cl.losses.CrossEntropy()))[names]
    traces = cl.trace(G, rtol=ACCURACY, by="parameter")
    return {
        name: {
            "trace": float(traces[name]),
            "top": float(cl.eigs(block, 1, tol=TOLERANCE).values[0]),
        }
        for name, block in G.blocks("parameter").items()
    }


class _Counted:
    """Somebody's operator with the size and dtype that `hutchinson` asks for."""

    def __init__(self, operator: Any, dtype: torch.dtype) -> None:
        self.operator, self.shape, self.dtype = operator, operator.shape, dtype

    def form(self, z: Tensor) -> float:
        return float(z @ (self.operator @ z))


def peer(model: nn.Module, batch: Batch, names: list[str]) -> Table:
    """curvlinops, one operator a parameter, everything else held fixed."""
    from curvlinops import GGNLinearOperator

    table: Table = {}
    parameters = dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        for name in names:
            operator: Any = GGNLinearOperator(
                model, TokenLoss(), [parameters[name]], [batch], check_deterministic=False
            )
            block: Any = _Counted(operator, parameters[name].dtype)
            value, _ = hutchinson(block, block.form)
            top = sla.eigsh(operator.to_scipy(), 1, which="LA", tol=TOLERANCE, return_eigenvectors=False)
            table[name] = {"trace": value, "top": float(top[0])}
    return table


def measure(*, quick: bool) -> dict[str, Any]:
    """Seconds, gradients, and how far the two are apart."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    sizes = QUICK if quick else LONG
    model, batch, names = make_model(sizes), make_batch(sizes), block_names(sizes)
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(5))
    result: dict[str, Any] = {"model": str(sizes), "blocks": len(names)}
    tables: dict[str, Table] = {}
    for way, make in {"curvlens": ours, "curvlinops": peer}.items():
        started = time.perf_counter()
        try:
            tables[way] = make(model, batch, names)
        except Exception as error:
            result[way] = {"not_run": reason(error)}
            continue
        result[way] = {"seconds": time.perf_counter() - started}
        result[way]["gradients"] = result[way]["seconds"] / unit
    if len(tables) == 2:
        for what in ("trace", "top"):
            pairs = [(tables["curvlens"][name][what], tables["curvlinops"][name][what]) for name in names]
            result[f"apart_{what}"] = max(abs(a / b - 1) for a, b in pairs)
    return result


if __name__ == "__main__":
    serve(measure)
