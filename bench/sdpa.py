"""Attention by tiles against torch's written-out kernel: a product with the second derivative, from nothing.

That is forward pass, gradient and the derivative of the gradient along a direction, by reverse over reverse: of causal
attention with head size 64, float32, in time and memory; and of the 6-layer GPT at 2048 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.measuring import peak, ratio, seconds, turns
from bench.model import FULL, QUICK, TokenLoss, gradient, model_and_batch
from bench.tables import Results, Table, Target, absent, threads, value
from curvlens.sdpa import scaled_dot_product_attention

HEAD = 64
LENGTHS = {256: 12, 512: 12, 1024: 12, 2048: 4, 4096: 4}
"""Heads for each length: as many as the written-out kernel has room for."""
UNITS = 19
"""Products of L x L x 64 that ours is made of: 2 forward, 5 for the gradient, 12 for the second derivative."""
MEMORY_ROWS = {
    "math 1024": ("math", 1024, 4),
    "tiles 1024": ("tiles", 1024, 4),
    "math 4096": ("math", 4096, 4),
    "tiles 4096": ("tiles", 4096, 4),
    "tiles 4096, 12 heads": ("tiles", 4096, 12),
    "tiles 8192, 12 heads": ("tiles", 8192, 12),
}
"""Way, length and heads."""
FASTER = {("1", "1024"): 2.5, ("2", "1024"): 2.2, ("1", "4096"): 4.0, ("2", "4096"): 4.0}
SLOWEST = 1 / 1.1
"""At 256 tokens, times as fast as the written-out kernel."""
LESS_MEMORY = 30.0
LONGEST = 1024.0
GROWTH = 2.3
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WAYS: dict[str, Attention] = {"tiles": ours, "math": written_out}


def inputs(length: int, heads: int) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and the gradient at the output, which is a variable as well: it moves with the layers behind.

    And a direction.
    """
    torch.manual_seed(0)
    given = [torch.randn(1, heads, length, HEAD, requires_grad=True) for _ in range(4)]
    return given, [torch.randn_like(x) for x in given[:3]]


def product(way: Attention, given: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of the gradient along a direction."""
    *qkv, w = given
    slope = torch.autograd.grad(way(*qkv), qkv, w, create_graph=True)
    return torch.autograd.grad(slope, given, along)


def speed() -> float:
    """Floating-point operations a second of a large product of matrices."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(5))


def time(*, quick: bool, length: int) -> dict[str, Any]:
    """Seconds of each, their ratio, how far they are apart, and the share of the peak that ours reaches."""
    heads = 2 if quick else LENGTHS[length]
    given, along = inputs(length, heads)
    found = {name: product(way, given, along) for name, way in WAYS.items()}  # also the first call of each
    pairs = zip(found["tiles"], found["math"], strict=True)
    off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    del found
    ways = {name: partial(product, way, given, along) for name, way in WAYS.items()}
    times = turns(ways, 2 if quick else 9 if length <= 1024 else 4)
    fastest = speed()
    operations = UNITS * heads * length**2 * HEAD  # 2 for multiplying and adding, half of it behind the mask
    return {
        "heads": heads,
        "seconds": {name: median(values) for name, values in times.items()},
        "faster": ratio(times["math"], times["tiles"]),
        "off": off,
        "peak": fastest,
        "share": operations / median(times["tiles"]) / fastest,
    }


def memory(*, quick: bool, key: str) -> dict[str, Any]:
    """MiB above the inputs, the direction and a small product, in a process of its own."""
    way, length, heads = MEMORY_ROWS[key]
    length = 600 if quick else length
    product(WAYS[way], *inputs(600, 1))  # libraries are no cost of it
    given, along = inputs(length, heads)
    return {"megabytes": peak(lambda: product(WAYS[way], given, along)), "length": length, "heads": heads}


def whole_model(*, quick: bool, way: str) -> dict[str, Any]:
    """H v of a GPT: peak MiB above model, data and one gradient, and seconds of a later product."""
    sizes = replace(QUICK, context=600, batch=1) if quick else replace(FULL, context=2048, batch=1)
    model, batch = model_and_batch(sizes)
    parameters = list(model.parameters())
    v = [torch.randn_like(p) for p in parameters]
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(2))

    def from_nothing() -> None:
        with cl.second_order() if way == "tiles" else sdpa_kernel(SDPBackend.MATH):
            loss = TokenLoss()(model(batch[0]), batch[1])
            slope = torch.autograd.grad(loss, parameters, create_graph=True)
            torch.autograd.grad(slope, parameters, v)

    held = peak(from_nothing)
    taken = min(seconds(from_nothing) for _ in range(2))
    return {"megabytes": held, "seconds": taken, "gradients": taken / unit}


# In the report


def _faster(results: Results, count: str, length: str) -> float | None:
    return value(results["sdpa"].get(count, {}).get(length, {"not_run": ""}), "faster")


def _held(results: Results, key: str) -> float | None:
    return value(results["sdpa_memory"][key], "megabytes")


def _ratio(results: Results, one: str, other: str) -> float | None:
    a, b = _held(results, one), _held(results, other)
    return None if a is None or b is None else a / b


def targets(results: Results) -> list[Target]:
    """Time by threads and length, and memory."""
    name = "second derivative of attention by tiles, times faster than torch's written-out kernel"
    wanted = {**FASTER, **{(count, "256"): SLOWEST for count in results["sdpa"]}}
    grown = _ratio(results, "tiles 8192, 12 heads", "tiles 4096, 12 heads")
    return [
        *(
            Target(f"{name}, {length} tokens, {threads(count)}", _faster(results, count, length), limit)
            for (count, length), limit in wanted.items()
        ),
        Target("its memory, times less, 4096 tokens", _ratio(results, "math 4096", "tiles 4096"), LESS_MEMORY),
        Target("its memory at 8192 tokens, 12 heads, MiB", _held(results, "tiles 8192, 12 heads"), LONGEST, True),
        Target("its memory, 8192 over 4096 tokens", grown, GROWTH, True),
    ]


def time_table(results: Results) -> Table:
    """By threads and length."""
    rows = []
    for count, lengths in results["sdpa"].items():
        for length, row in lengths.items():
            if "not_run" in row:
                rows.append([length, "", count, *absent(row, 5)])
                continue
            both = [f"{row['seconds'][key]:.3f}" for key in ("tiles", "math")]
            share = f"{row['share']:.0%}"
            rows.append([length, str(row["heads"]), count, *both, f"{row['faster']:.1f}", share, f"{row['off']:.0e}"])
    head = ["Tokens", "heads", "threads", "ours, s", "math, s", "times faster", "share of peak", "apart"]
    notes = [
        "Forward pass, gradient, and derivative of the gradient along a direction, all together; causal, head size 64, "
        "float32, `SDPBackend.MATH` beside. Ours is by tiles above 256 keys and written out below. Share of peak: the "
        "operations that a causal mask leaves (19 products of matrices), per second, over those of a product of two "
        "matrices 2048 x 2048 with as many threads."
    ]
    return Table("Second derivative of attention", head, rows, notes)


def memory_table(results: Results) -> Table:
    """By way and length."""
    rows = []
    for key, row in results["sdpa_memory"].items():
        way = "by tiles" if key.startswith("tiles") else "SDPBackend.MATH"
        cells = [way, key.split()[1].rstrip(",")]
        rows.append(
            [*cells, *(["not run", ""] if "not_run" in row else [str(row["heads"]), f"{row['megabytes']:.0f}"])]
        )
    notes = ["Peak above inputs and direction, each in a process of its own; one thread."]
    return Table("Memory of a second derivative of attention", ["Way", "tokens", "heads", "MiB"], rows, notes)


def model_table(results: Results) -> Table:
    """By way."""
    rows = []
    for way, row in results["long_context"].items():
        name = "attention by tiles" if way == "tiles" else "SDPBackend.MATH"
        if "not_run" in row:
            rows.append([name, *absent(row, 3)])
        else:
            rows.append([name, f"{row['seconds']:.1f}", f"{row['gradients']:.1f}", f"{row['megabytes']:.0f}"])
    notes = ["6 layers, d 384, 6 heads, one sequence of 2048 tokens, two threads; reverse over reverse from nothing."]
    return Table("A product with H at 2048 tokens", ["Attention", "seconds", "gradients", "MiB"], rows, notes)
