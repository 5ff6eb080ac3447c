"""A product with H of the 6-layer GPT at 2048 tokens, with attention by tiles and written out by torch."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.child import serve
from bench.memory import peak_reset, peak_since
from bench.model import FULL, QUICK, Batch, TokenLoss, gradient, make_batch, make_model
from bench.timing import seconds
from curvlens.models import GPT

LONG = replace(FULL, context=2048, batch=1)


def attention(way: str) -> AbstractContextManager[Any]:
    return cl.second_order() if way == "tiles" else sdpa_kernel(SDPBackend.MATH)


def product(model: GPT, batch: Batch, v: list[Tensor], way: str) -> tuple[Tensor, ...]:
    """H v by reverse over reverse, from nothing."""
    parameters = list(model.parameters())
    with attention(way):
        loss = TokenLoss()(model(batch[0]), batch[1])
        slope = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(slope, parameters, v)


def measure(*, quick: bool, way: str) -> dict[str, Any]:
    """Peak MiB above model, data and one gradient, and seconds of a later product."""
    sizes = replace(QUICK, context=600, batch=1) if quick else LONG
    model, batch = make_model(sizes), make_batch(sizes)
    v = [torch.randn_like(p) for p in model.parameters()]
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(2))
    gc.collect()
    before = peak_reset()
    product(model, batch, v, way)
    held = peak_since(before)
    taken = min(seconds(lambda: product(model, batch, v, way)) for _ in range(2))
    return {"megabytes": held, "seconds": taken, "gradients": taken / unit}


if __name__ == "__main__":
    serve(measure)
