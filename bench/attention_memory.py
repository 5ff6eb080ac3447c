"""Peak memory of assembling the dense Hessian of attention, above what the process held before."""

from __future__ import annotations

import gc
from typing import Any

import torch

from bench.child import serve
from bench.memory import peak_reset, peak_since
from curvlens.calculus import attention


def measure(*, quick: bool) -> dict[str, Any]:
    """MiB of the output, of one block, and of the peak."""
    width, length = (16, 17) if quick else (40, 64)
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(length, width, generator=generator, dtype=torch.float64) for _ in range(2))
    WQ, WK, WV = (torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in range(3))
    few = slice(0, 4)  # kernels and imports are no cost of the assembly
    attention.hessian(X[:, few], WQ[few, few], WK[few, few], WV[few, few], target=Y[:, few]).total.dense()
    gc.collect()
    before = peak_reset()
    attention.hessian(X, WQ, WK, WV, target=Y).total.dense()
    size = width**2
    return {
        "megabytes": peak_since(before),
        "output": (3 * size) ** 2 / 2**17,
        "block": size**2 / 2**17,
        "width": width,
    }


if __name__ == "__main__":
    serve(measure)
