"""Attention by tiles against torch's written-out kernel: a product with the second derivative, from nothing.

That is forward pass, gradient and the derivative of the gradient along a direction, by reverse over reverse; causal,
head size 64, float32. Both take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.child import serve
from bench.timing import seconds
from curvlens.sdpa import scaled_dot_product_attention

HEAD = 64
LENGTHS = {256: 12, 512: 12, 1024: 12, 2048: 4, 4096: 4}
"""Heads for each length: as many as the written-out kernel has room for."""
UNITS = 19
"""Products of L x L x 64 that ours is made of: 2 forward, 5 for the gradient, 12 for the second derivative."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WAYS: dict[str, Attention] = {"tiles": ours, "math": written_out}


def inputs(length: int, heads: int) -> list[Tensor]:
    """q, k, v and the gradient at the output, which is a variable as well: it moves with the layers behind."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, HEAD, requires_grad=True) for _ in range(4)]


def product(way: Attention, given: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of the gradient along a direction."""
    *qkv, w = given
    gradient = torch.autograd.grad(way(*qkv), qkv, w, create_graph=True)
    return torch.autograd.grad(gradient, given, along)


def peak() -> float:
    """Floating-point operations a second of a large product of matrices."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(5))


def measure(*, quick: bool, length: int) -> dict[str, Any]:
    """Seconds of each, their ratio, how far they are apart, and the share of the peak that ours reaches."""
    heads = 2 if quick else LENGTHS[length]
    given = inputs(length, heads)
    along = [torch.randn_like(x) for x in given[:3]]
    found = {name: product(way, given, along) for name, way in WAYS.items()}  # also the first call of each
    pairs = zip(found["tiles"], found["math"], strict=True)
    off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    del found
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(2 if quick else 9 if length <= 1024 else 4):
        for name, way in WAYS.items():
            times[name].append(seconds(lambda way=way: product(way, given, along)))  # type: ignore[misc]
    fastest = peak()
    operations = UNITS * heads * length**2 * HEAD  # 2 for multiplying and adding, half of it behind the mask
    return {
        "heads": heads,
        "seconds": {name: median(values) for name, values in times.items()},
        "faster": median(b / a for a, b in zip(times["tiles"], times["math"], strict=True)),
        "off": off,
        "peak": fastest,
        "share": operations / median(times["tiles"]) / fastest,
    }


if __name__ == "__main__":
    serve(measure)
