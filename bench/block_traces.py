"""The traces of all diagonal blocks of G to five percent: from joint backward passes, and block by block."""

from __future__ import annotations

import time
from typing import Any

import torch

import curvlens as cl
from bench.child import serve
from bench.model import MIDDLE, QUICK, gradient, make_batch, make_model
from bench.timing import seconds

ACCURACY = 0.05


def measure(*, quick: bool) -> dict[str, Any]:
    """Seconds and samples of both ways, in gradients; the blocks are all parameters."""
    sizes = QUICK if quick else MIDDLE
    model, batch = make_model(sizes, torch.float64), make_batch(sizes)
    G = cl.ggn(cl.Problem(model, [batch], cl.losses.CrossEntropy()))
    G @ torch.zeros(G.shape[1], dtype=torch.float64)  # both ways share the graph
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(5))
    started = time.perf_counter()
    joint = cl.trace(G, rtol=ACCURACY, by="block")
    joint_time = time.perf_counter() - started
    floor = 1e-9 * max(float(e) for e in joint.values())
    names = [name for name, estimate in joint.items() if float(estimate) > floor]
    started = time.perf_counter()
    loop = {name: cl.trace(G[name], rtol=ACCURACY) for name in names}
    loop_time = time.perf_counter() - started
    return {
        "model": str(sizes),
        "blocks": len(names),
        "joint": {"gradients": joint_time / unit, "samples": next(iter(joint.values())).samples},
        "loop": {"gradients": loop_time / unit, "samples": sum(e.samples for e in loop.values())},
        "cheaper": loop_time / joint_time,
        "disagreement": max(abs(float(joint[name]) / float(loop[name]) - 1) for name in names),
    }


if __name__ == "__main__":
    serve(measure)
