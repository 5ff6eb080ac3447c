"""One vector for each weight matrix: a kept graph, of which autograd walks only the part needed, against fresh HVPs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.child import serve
from bench.model import FULL, QUICK, TokenLoss, block_names, gradient, make_batch, make_model
from bench.timing import seconds, spread


def measure(*, quick: bool, repetitions: int) -> dict[str, Any]:
    """Sums over all blocks in gradients, and how many times cheaper the kept graph is; all take turns by block."""
    sizes = QUICK if quick else FULL
    model, batch = make_model(sizes), make_batch(sizes)
    params = dict(model.named_parameters())
    names = block_names(sizes)
    vectors = {name: torch.randn_like(params[name]) for name in names}
    hessian = cl.hessian(cl.Problem(model, [batch], cl.losses.CrossEntropy()))

    def kept(name: str) -> Tensor:
        product: Tensor = hessian[name] @ vectors[name].flatten()
        return product

    def fresh(name: str) -> Tensor:
        problem = cl.Problem(model, [batch], cl.losses.CrossEntropy(), params=[name])
        product: Tensor = cl.hessian(problem) @ vectors[name].flatten()
        return product

    def plain(name: str) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            loss = TokenLoss()(model(batch[0]), batch[1])
            (slope,) = torch.autograd.grad(loss, params[name], create_graph=True)
            return torch.autograd.grad(slope, params[name], vectors[name])[0].flatten()

    ways: dict[str, Callable[[str], Tensor]] = {"kept": kept, "fresh": fresh, "plain": plain}
    results = {way: call(names[0]) for way, call in ways.items()}
    scale = results["plain"].norm()
    disagreement = max(float((result - results["plain"]).norm() / scale) for result in results.values())

    totals: dict[str, list[float]] = {way: [] for way in ways}
    gc.disable()
    for _ in range(repetitions):
        units: list[float] = []
        spent = dict.fromkeys(ways, 0.0)
        for index, name in enumerate(names):
            if index % 6 == 0:
                units.append(seconds(lambda: gradient(model, batch)))
                gc.collect()
            for way, call in ways.items():
                spent[way] += seconds(lambda call=call, name=name: call(name))  # type: ignore[misc]
        for way in ways:
            totals[way].append(spent[way] / median(units))
    return {
        "blocks": len(names),
        "disagreement": disagreement,
        **{way: spread(totals[way]) for way in ways},
        "cheaper_than_fresh": spread([f / k for f, k in zip(totals["fresh"], totals["kept"], strict=True)]),
        "cheaper_than_plain": spread([f / k for f, k in zip(totals["plain"], totals["kept"], strict=True)]),
    }


if __name__ == "__main__":
    serve(measure)
