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
        """A Hessian-vector product from scratch, the vector being zero outside the block."""
        everything = list(params.values())
        padded = [vectors[name] if p is params[name] else torch.zeros_like(p) for p in everything]
        with sdpa_kernel(SDPBackend.MATH):
            loss = TokenLoss()(model(batch[0]), batch[1])
            slopes = torch.autograd.grad(loss, everything, create_graph=True)
            rows = torch.autograd.grad(slopes, everything, padded)
        return rows[list(params).index(name)].flatten()

    def pruned(name: str) -> Tensor:
        """The same by somebody who knows autograd: differentiated by the block only, both times."""
        with sdpa_kernel(SDPBackend.MATH):
            loss = TokenLoss()(model(batch[0]), batch[1])
            (slope,) = torch.autograd.grad(loss, params[name], create_graph=True)
            return torch.autograd.grad(slope, params[name], vectors[name])[0].flatten()

    ways: dict[str, Callable[[str], Tensor]] = {"kept": kept, "fresh": fresh, "pruned": pruned}
    results = {way: call(names[0]) for way, call in ways.items()}
    scale = results["fresh"].norm()
    disagreement = max(float((result - results["fresh"]).norm() / scale) for result in results.values())

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
        "cheaper_than_pruned": spread([f / k for f, k in zip(totals["pruned"], totals["kept"], strict=True)]),
    }


if __name__ == "__main__":
    serve(measure)
