"""A search for eigenvalues over long vectors: its time over that of its products, its announced and its real memory.

``python -m bench.search`` looks for the largest one on a GPT; ``--model FOLDER`` on a causal language model of Hugging
Face, and ``--freed`` measures memory: freed memory goes back to the system at once, which takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl
from bench.measuring import RETURN_FREED, peak_reset, peak_since, run
from bench.model import FEW_TOKENS, QUICK, SMALL, Sizes, model_and_batch
from bench.tables import Results, Table, Target, absent, absent_table
from curvlens.operators import Operator
from curvlens.operators.base import Progress

TOL = 1e-2
BUDGETS = ("1500MiB",)
LARGE = Sizes(n_layer=8, d_model=512, n_head=8, context=128, batch=1, vocab=8000)
"""30 million parameters."""
TINY = Sizes(n_layer=2, d_model=64, n_head=2, context=32, batch=1, vocab=500)
TIME_TARGET, MEMORY_TARGET = 1.3, 0.2


def largest(*, quick: bool, model: str | None = None, budget: str | None = None) -> dict[str, Any]:
    """Seconds of the search and of its products, MiB announced and real above a model with its gradients."""
    warnings.simplefilter("ignore")
    _warm(TINY)
    network, batch, loss = _hugging_face(model) if model else _gpt(TINY if quick else LARGE)
    problem = cl.Problem(network, batch, loss)
    problem.gradient()
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    seconds = timed_products()
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


def announced(*, quick: bool, budget: str) -> dict[str, Any]:
    """A basis filled to the brim: MiB announced by the result, and the peak above what was held after a gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    _warm(SMALL)
    problem = cl.Problem(*_gpt(QUICK if quick else FEW_TOKENS))
    problem.gradient()
    before = peak_reset()
    if not before[1]:
        return {"not_run": "the peak of memory cannot be reset on this system"}
    products = 20 if quick else 50
    result = cl.eigs(cl.hessian(problem), 5, tol=1e-7, memory=budget, max_products=products)
    return {
        "announced": result.memory / 2**20,
        "real": peak_since(before),
        "basis": result.provenance["basis"],
        "products": result.products,
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


def _warm(sizes: Sizes) -> None:
    """What libraries load at their first use is no cost of a search."""
    cl.eigs(cl.hessian(cl.Problem(*_gpt(sizes))), 1, max_products=3)


def _gpt(sizes: Sizes) -> tuple[nn.Module, Any, Any]:
    return *model_and_batch(sizes), cl.losses.CrossEntropy()


def _hugging_face(name: str) -> tuple[nn.Module, Any, Any]:
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    network.eval()
    generator = torch.Generator().manual_seed(1)
    tokens: Tensor = torch.randint(network.config.vocab_size, (1, 128), generator=generator)
    return network, {"input_ids": tokens, "labels": tokens}, cl.losses.CausalLM()


# In the report


def targets(results: Results) -> list[Target]:
    """Real against announced memory, and time beside the products."""
    off = [
        None if "not_run" in row else abs(row["real"] / row["announced"] - 1) for row in results["announced"].values()
    ]
    worst = None if None in off else max(x for x in off if x is not None)
    found = [Target("announced against real memory, relative", worst, MEMORY_TARGET, True)]
    if "search" not in results:
        return found
    timed, held = results["search"]["time"], results["search"]["memory"]
    over = None if "not_run" in timed else timed["seconds"] / timed["seconds of products"]
    more = None if "not_run" in held else held["real"] / held["announced"] - 1
    return [
        *found,
        Target("time of eigs over that of its products, long vectors", over, TIME_TARGET, True),
        Target("memory of eigs beyond what it announced, long vectors, relative", more, MEMORY_TARGET, True),
    ]


def announced_table(results: Results) -> Table:
    """By budget."""
    rows = []
    for budget, row in results["announced"].items():
        if "not_run" in row:
            rows.append([budget, *absent(row, 4)])
            continue
        cells = [
            f"{row['announced']:.0f}",
            f"{row['real']:.0f}",
            f"{row['real'] / row['announced'] - 1:+.1%}",
            f"{row['basis']}",
        ]
        rows.append([budget, *cells])
    notes = [
        "MiB of `eigs(H, 5, memory=…)` on the model of the first table and one sequence of 32 tokens, searching until "
        "50 products are done: what the result announces, and the peak of resident memory above what the "
        "process held after a gradient."
    ]
    return Table(
        "Announced and real memory", ["memory=", "announced", "real", "difference", "basis vectors"], rows, notes
    )


def largest_table(results: Results) -> Table:
    """The largest eigenvalue: a run for time, one for memory."""
    title, runs = "A search over long vectors", results["search"]
    rows = []
    for what, row in runs.items():
        if "not_run" in row:
            return absent_table(title, row)
        cells = ("products", "basis", "seconds", "seconds of products", "announced", "real")
        rows.append([what, *(f"{row[cell]:.0f}" for cell in cells)])
    notes = [
        f"`eigs(H, 1, tol=1e-2)` over {runs['time']['parameters'] / 1e6:.0f} million parameters and 128 tokens, 2 "
        "threads, memory in MiB above the model with its gradients. Memory is measured in a run of its own, which "
        "gives freed memory back at once and is slower."
    ]
    head = ["Run", "products", "basis vectors", "s", "s of products", "announced", "real"]
    return Table(title, head, rows, notes)


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
        "search.largest",
        threads=options.threads,
        environment=RETURN_FREED if options.freed else None,
        quick=options.quick,
        model=options.model,
        budget=options.memory,
    )
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
