"""The traces of all diagonal blocks of G to five percent: from joint backward passes, and in a loop over the blocks.

The loop is Hutchinson's estimator, which is what the joint passes do for all blocks at once: with products of each
block's operator, as everyone writes it; with quadratic forms ⟨J z, Λ J z⟩, which cost half; and with our own
estimator, which deflates each block first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import scipy.stats
import torch
from torch import Tensor

import curvlens as cl
from bench.child import serve
from bench.model import MIDDLE, QUICK, gradient, make_batch, make_model
from bench.timing import seconds
from curvlens.blocks import By

ACCURACY = 0.05


def products(block: cl.Operator) -> tuple[float, int]:
    """Hutchinson by products."""
    return hutchinson(block, lambda z: float(z @ (block @ z)))


def forms(block: cl.Operator) -> tuple[float, int]:
    """Hutchinson by quadratic forms."""
    return hutchinson(block, block.quadratic)


def hutchinson(block: cl.Operator, form: Callable[[Tensor], float]) -> tuple[float, int]:
    """Plain samples until the 95 % interval is as short as asked for, looked at as seldom as ours looks."""
    generator = torch.Generator().manual_seed(0)
    values: list[float] = []
    check = 6
    while True:
        z = torch.randint(2, (block.shape[1],), generator=generator).to(block.dtype) * 2 - 1
        values.append(form(z))
        if len(values) >= check:
            half = stdev(values) / math.sqrt(len(values)) * float(scipy.stats.t.ppf(0.975, len(values) - 1))
            if half <= ACCURACY * mean(values):
                return mean(values), len(values)
            check = math.ceil(1.3 * len(values))


def ours(block: cl.Operator) -> tuple[float, int]:
    """Ours, of one block."""
    estimate = cl.trace(block, rtol=ACCURACY)
    return float(estimate), estimate.samples


WAYS: dict[str, Callable[[cl.Operator], tuple[float, int]]] = {"products": products, "forms": forms, "deflated": ours}


def measure(*, quick: bool) -> dict[str, Any]:
    """Gradients and samples of all ways, for the parameters one by one and for blocks by layer and role."""
    sizes = QUICK if quick else MIDDLE
    model, batch = make_model(sizes, torch.float64), make_batch(sizes)
    G = cl.ggn(cl.Problem(model, [batch], cl.losses.CrossEntropy()))
    G @ torch.zeros(G.shape[1], dtype=torch.float64)  # all ways share the graph
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(5))
    return {"model": str(sizes), "parameter": _compared(G, "parameter", unit), "block": _compared(G, "block", unit)}


def _compared(G: cl.Operator, by: By, unit: float) -> dict[str, Any]:
    started = time.perf_counter()
    joint = cl.trace(G, rtol=ACCURACY, by=by)
    joint_time = time.perf_counter() - started
    floor = 1e-9 * max(float(e) for e in joint.values())
    blocks = {name: block for name, block in G.blocks(by).items() if float(joint[name]) > floor}
    result: dict[str, Any] = {
        "blocks": len(blocks),
        "joint": {"gradients": joint_time / unit, "samples": max(e.samples for e in joint.values())},
    }
    ways = WAYS if by == "block" else {way: WAYS[way] for way in ("products", "forms")}
    for way, estimate in ways.items():
        started = time.perf_counter()
        loop = {name: estimate(block) for name, block in blocks.items()}
        spent = time.perf_counter() - started
        result[way] = {
            "gradients": spent / unit,
            "samples": sum(samples for _, samples in loop.values()),
            "cheaper": spent / joint_time,
            "disagreement": max(abs(float(joint[name]) / value - 1) for name, (value, _) in loop.items()),
        }
    return result


if __name__ == "__main__":
    serve(measure)
