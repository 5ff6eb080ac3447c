"""The largest eigenvalue of a Hessian of many parameters: its time over that of its products, its announced memory.

``python -m bench.search`` does it on a GPT; ``--model FOLDER`` on a causal language model of Hugging Face, and
``--freed`` measures memory: freed memory goes back to the system at once, which takes time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl
from bench.child import run, serve
from bench.memory import RETURN_FREED, peak_reset, peak_since
from bench.model import Sizes, make_batch, make_model
from curvlens.operators import Operator
from curvlens.operators.base import Progress

TOL = 1e-2
LARGE = Sizes(n_layer=8, d_model=512, n_head=8, context=128, batch=1, vocab=8000)
"""30 million parameters."""
TINY = Sizes(n_layer=2, d_model=64, n_head=2, context=32, batch=1, vocab=500)


def measure(*, quick: bool, model: str | None = None, budget: str | None = None) -> dict[str, Any]:
    """Seconds of the search and of its products, MiB announced and real above a model with its gradients."""
    warnings.simplefilter("ignore")
    # What libraries load at their first use is no cost of a search.
    cl.eigs(cl.hessian(cl.Problem(*_gpt(TINY))), 1, max_products=3)
    network, batch, loss = _hugging_face(model) if model else _gpt(TINY if quick else LARGE)
    problem = cl.Problem(network, batch, loss)
    problem.gradient()
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    seconds = timed_products()
    gc.collect()
    before = peak_reset()
    problem._evaluation.cache.prepare()  # graphs are built for the first product, and are no part of the search
    started = time.perf_counter()
    result = cl.eigs(cl.hessian(problem), 1, tol=TOL, memory=budget)
    whole = time.perf_counter() - started
    return {
        "parameters": problem.layout.size,
        "value": float(result.values[0]),
        "residual": float(result.residuals[0]) / result.norm,
        "products": result.products,
        "basis": result.provenance["basis"],
        "seconds": whole,
        "seconds of products": sum(seconds),
        "announced": result.memory / 2**20,
        "real": peak_since(before),
        "reset": before[1],
    }


def timed_products() -> list[float]:
    """From now on, how long each product took; the first one with the graphs that were built for it."""
    seconds: list[float] = []
    inner = Operator.apply

    def timed(self: Operator, v: Any, progress: Progress | None = None) -> Any:
        started = time.perf_counter()
        result = inner(self, v, progress)
        seconds.append(time.perf_counter() - started)
        return result

    Operator.apply = timed  # type: ignore[method-assign]
    return seconds


def _gpt(sizes: Sizes) -> tuple[nn.Module, Any, Any]:
    return make_model(sizes), make_batch(sizes), cl.losses.CrossEntropy()


def _hugging_face(name: str) -> tuple[nn.Module, Any, Any]:
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    network.eval()
    generator = torch.Generator().manual_seed(1)
    tokens: Tensor = torch.randint(network.config.vocab_size, (1, 128), generator=generator)
    return network, {"input_ids": tokens, "labels": tokens}, cl.losses.CausalLM()


def main() -> None:
    """Measure in a process of its own and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__)
    parser.add_argument("--model", help="folder or name of a causal language model of Hugging Face; a GPT if not given")
    parser.add_argument("--memory", help="budget, as 6GB; what eigs chooses if not given")
    parser.add_argument("--freed", action="store_true", help="measure memory, not time")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    row = run(
        "bench.search",
        threads=options.threads,
        environment=RETURN_FREED if options.freed else None,
        quick=options.quick,
        model=options.model,
        budget=options.memory,
    )
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(measure)
    else:
        main()
