"""The dense Hessian of one Transformer block: closed forms put together, beside torch.func.hessian."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import hessian

import curvlens as cl
from bench.measuring import ratio, turns
from bench.tables import Results, Table, Target, absent_table, value

WIDTH, INNER = 16, 64
TARGET = 5.0


def measure(*, quick: bool, repetitions: int = 9) -> dict[str, Any]:
    """Seconds of both, in turns; how far each is from products by reverse over reverse."""
    length = 5 if quick else 17
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    square = {name: draw(WIDTH, WIDTH, scale=WIDTH**-0.5) for name in ("q", "k", "v", "o")}
    weights = {
        "norm1.scale": 1 + draw(WIDTH, scale=0.1),
        "norm1.shift": draw(WIDTH, scale=0.1),
        **square,
        "norm2.scale": 1 + draw(WIDTH, scale=0.1),
        "norm2.shift": draw(WIDTH, scale=0.1),
        "up": draw(WIDTH, INNER, scale=WIDTH**-0.5),
        "down": draw(INNER, WIDTH, scale=INNER**-0.5),
    }
    X, Y = draw(length, WIDTH), draw(length, WIDTH)
    network = cl.assembly.block(weights, heads=1, norm="pre", activation="gelu", mask="causal")
    names = network.names
    theta = torch.cat([weights[name].reshape(-1) for name in names])
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def written_out(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale + shift

    def fused(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), scale, shift)

    def loss(t: Tensor, norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        parts = torch.split(t, [weights[name].numel() for name in names])
        w = {name: part.view(weights[name].shape) for name, part in zip(names, parts, strict=True)}
        h = norm(X, w["norm1.scale"], w["norm1.shift"])
        scores = (h @ w["q"] @ (h @ w["k"]).T / WIDTH**0.5).masked_fill(~causal, -torch.inf)
        x = X + scores.softmax(-1) @ (h @ w["v"]) @ w["o"]
        h = norm(x, w["norm2.scale"], w["norm2.shift"])
        y = x + F.gelu(h @ w["up"]) @ w["down"]
        apart: Tensor = ((y - Y) ** 2).mean()
        return apart

    def closed() -> Tensor:
        return network.hessian(X, target=Y).total.dense()

    def by_torch(norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        matrix: Tensor = hessian(lambda t: loss(t, norm))(theta)
        return matrix

    ways: dict[str, Callable[[], Tensor]] = {
        "closed": closed,
        "torch": lambda: by_torch(written_out),
        "torch_fused": lambda: by_torch(fused),
    }
    v = draw(len(theta))
    at = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at, fused), at, create_graph=True)
    (truth,) = torch.autograd.grad(gradient, at, v)
    off = {name: float((way() @ v - truth).norm() / truth.norm()) for name, way in ways.items()}
    times = turns(ways, 2 if quick else repetitions, dict.fromkeys(ways, 3))
    return {
        "seconds": {name: median(values) for name, values in times.items()},
        "faster": {name: ratio(values, times["closed"]) for name, values in times.items()},
        "off": off,
        "parameters": len(theta),
    }


def targets(results: Results) -> list[Target]:
    """Times faster."""
    faster = value(results["assembly"], "faster", "torch")
    return [Target("closed-form Hessian of a Transformer block, times faster than torch.func", faster, TARGET)]


def table(results: Results) -> Table:
    """Times and errors."""
    data = results["assembly"]
    title, head = "Dense Hessian of a Transformer block", ["Way", "seconds", "in closed forms", "error"]
    if "not_run" in data:
        return absent_table(title, data, head)
    names = {
        "closed": "closed forms",
        "torch": "torch.func.hessian, norms written out",
        "torch_fused": "torch.func.hessian, F.layer_norm",
    }
    rows = [
        [label, f"{data['seconds'][key]:.3f}", f"{data['faster'][key]:.1f}", f"{data['off'][key]:.0e}"]
        for key, label in names.items()
    ]
    notes = [
        f"Pre-LN, one head, GELU, d = 16, MLP 64, 17 tokens, {data['parameters']} parameters, float64, square loss, "
        "one thread; all take turns, a ratio is the median of the turns' ratios. Errors are those of a product, "
        "against reverse over reverse: torch.func.hessian is forward over reverse, and wrong through F.layer_norm in "
        "torch 2.13."
    ]
    return Table(title, head, rows, notes)
