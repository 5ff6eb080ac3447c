"""The closed-form Hessian of attention beside automatic differentiation: the dense matrix, and one product.

One sample, d_V = d_K = 16, float64, square loss. All ways take turns; in a turn, a time is the least of a few calls. A
ratio is the median of the ratios of the turns, so that a phase in which the machine is slow counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.func import hessian

from bench.child import serve
from bench.timing import seconds
from curvlens.calculus import attention

WIDTH = 16
LENGTHS = (17, 64, 128)


def measure(*, quick: bool, length: int, repetitions: int = 15) -> dict[str, Any]:
    """Seconds of every way; one process a length, since what was freed before makes torch.func faster or slower."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X, Y = draw(length, WIDTH), draw(length, WIDTH)
    WQ, WK, WV = (draw(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3))
    theta = torch.cat([w.reshape(-1) for w in (WQ, WK, WV)])

    def loss(t: Tensor) -> Tensor:
        q, k, v = t.view(3, WIDTH, WIDTH)
        scores: Tensor = X @ q @ k.T @ X.T / WIDTH**0.5
        apart: Tensor = scores.softmax(-1) @ X @ v - Y
        return (apart**2).mean()

    def closed() -> Tensor:
        return attention.hessian(X, WQ, WK, WV, target=Y).total.dense()

    def by_torch() -> Tensor:
        matrix: Tensor = hessian(loss)(theta)
        return matrix

    disagreement = float((closed() - by_torch()).norm() / by_torch().norm())
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    v, at = draw(len(theta)), theta.clone().requires_grad_()
    (kept,) = torch.autograd.grad(loss(at), at, create_graph=True)

    def fresh() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
        return torch.autograd.grad(gradient, at, v)[0]

    ways: dict[str, Callable[[], Tensor]] = {
        "dense": closed,
        "dense_torch": by_torch,
        "product": lambda: H.matvec(v),
        "product_fresh": fresh,
        "product_kept": lambda: torch.autograd.grad(kept, at, v, retain_graph=True)[0],
    }
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3 if quick else repetitions):
        for name, way in ways.items():
            inner = 3 if name == "dense_torch" else 20
            times[name].append(min(seconds(way) for _ in range(inner)))
    ratios = {
        f"{name}_faster": median(slow / fast for slow, fast in zip(times[other], times[name], strict=True))
        for name, other in (("dense", "dense_torch"), ("product", "product_fresh"))
    }
    return {**{name: median(values) for name, values in times.items()}, **ratios, "disagreement": disagreement}


if __name__ == "__main__":
    serve(measure)
