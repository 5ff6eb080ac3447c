"""Peak memory of one product with the second derivative of attention, in a process of its own."""

from __future__ import annotations

import gc
from typing import Any

import torch

from bench.child import serve
from bench.memory import peak_reset, peak_since
from bench.sdpa import WAYS, inputs, product

ROWS = {
    "math 1024": ("math", 1024, 4),
    "tiles 1024": ("tiles", 1024, 4),
    "math 4096": ("math", 4096, 4),
    "tiles 4096": ("tiles", 4096, 4),
    "tiles 4096, 12 heads": ("tiles", 4096, 12),
    "tiles 8192, 12 heads": ("tiles", 8192, 12),
}
"""Way, length and heads."""


def measure(*, quick: bool, key: str) -> dict[str, Any]:
    """MiB above the inputs, the direction and a small product."""
    way, length, heads = ROWS[key]
    length = 600 if quick else length
    small = inputs(600, 1)
    product(WAYS[way], small, [torch.randn_like(x) for x in small[:3]])  # libraries are no cost of it
    given = inputs(length, heads)
    along = [torch.randn_like(x) for x in given[:3]]
    gc.collect()
    before = peak_reset()
    product(WAYS[way], given, along)
    return {"megabytes": peak_since(before), "length": length, "heads": heads}


if __name__ == "__main__":
    serve(measure)
