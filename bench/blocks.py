"""Blocks: a vector for each, the traces of all, and a table of trace and largest eigenvalue, beside loops over them."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import mean, median, stdev
from typing import Any

import scipy.sparse.linalg as sla
import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.measuring import reason, seconds, spread
from bench.model import (
    FEW_TOKENS,
    FULL,
    MIDDLE,
    QUICK,
    Batch,
    TokenLoss,
    block_names,
    gradient,
    make_batch,
    make_model,
    model_and_batch,
)
from bench.tables import Results, Table, Target, absent, absent_table, threads, value
from curvlens.blocks import By

ACCURACY = 0.05
"""Of traces."""
TOLERANCE = 0.01
"""Of eigenvalues."""
VECTORS_TARGET = 4.0
TRACES_TARGET = 10.0
KINDS: dict[By, str] = {"parameter": "parameters", "block": "blocks by layer and role"}
BlockTable = dict[str, dict[str, float]]


# A vector for each block


def vectors(*, quick: bool, repetitions: int) -> dict[str, Any]:
    """Sums over all blocks in gradients, and how many times cheaper a kept graph is than fresh products.

    Autograd walks only the part of it that a block needs. All take turns by block.
    """
    sizes = QUICK if quick else FULL
    model, batch = model_and_batch(sizes)
    params = dict(model.named_parameters())
    names = block_names(sizes)
    given = {name: torch.randn_like(params[name]) for name in names}
    hessian = cl.hessian(cl.Problem(model, [batch], cl.losses.CrossEntropy()))

    def kept(name: str) -> Tensor:
        product: Tensor = hessian[name] @ given[name].flatten()
        return product

    def fresh(name: str) -> Tensor:
        """A Hessian-vector product from scratch, the vector being zero outside the block."""
        everything = list(params.values())
        padded = [given[name] if p is params[name] else torch.zeros_like(p) for p in everything]
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
            return torch.autograd.grad(slope, params[name], given[name])[0].flatten()

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


# Traces


def form(operator: Any, z: Tensor) -> float:
    """zᵀ A z by a product."""
    return float(z @ (operator @ z))


def products(block: cl.Operator) -> tuple[float, int]:
    """Hutchinson by products, as everyone writes it."""
    return hutchinson(partial(form, block), block.shape[1], block.dtype)


def forms(block: cl.Operator) -> tuple[float, int]:
    """Hutchinson by quadratic forms ⟨J z, Λ J z⟩, which cost half."""
    return hutchinson(block.quadratic, block.shape[1], block.dtype)


def hutchinson(quadratic: Callable[[Tensor], float], size: int, dtype: torch.dtype) -> tuple[float, int]:
    """Plain samples until the 95 % interval is as short as asked for, looked at as seldom as ours looks."""
    generator = torch.Generator().manual_seed(0)
    values: list[float] = []
    check = 6
    while True:
        z = torch.randint(2, (size,), generator=generator).to(dtype) * 2 - 1
        values.append(quadratic(z))
        if len(values) >= check:
            half = stdev(values) / math.sqrt(len(values)) * float(scipy.stats.t.ppf(0.975, len(values) - 1))
            if half <= ACCURACY * mean(values):
                return mean(values), len(values)
            check = math.ceil(1.3 * len(values))


def deflated(block: cl.Operator) -> tuple[float, int]:
    """Ours, which deflates each block first."""
    estimate = cl.trace(block, rtol=ACCURACY)
    return float(estimate), estimate.samples


LOOPS: dict[str, Callable[[cl.Operator], tuple[float, int]]] = {
    "products": products,
    "forms": forms,
    "deflated": deflated,
}


def traces(*, quick: bool) -> dict[str, Any]:
    """Gradients and samples of all ways, for the parameters one by one and for blocks by layer and role."""
    sizes = QUICK if quick else MIDDLE
    model, batch = make_model(sizes, torch.float64), make_batch(sizes)
    G = cl.ggn(cl.Problem(model, [batch], cl.losses.CrossEntropy()))
    G @ torch.zeros(G.shape[1], dtype=torch.float64)  # all ways share the graph
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(5))
    return {"model": str(sizes), **{by: _compared(G, by, unit) for by in KINDS}}


def _compared(G: cl.Operator, by: By, unit: float) -> dict[str, Any]:
    started = time.perf_counter()
    joint = cl.trace(G, rtol=ACCURACY, by=by)
    joint_time = time.perf_counter() - started
    floor = 1e-9 * max(float(e) for e in joint.values())
    blocks = {name: block for name, block in G.blocks(by).items() if float(joint[name]) > floor}
    result: dict[str, Any] = {
        "blocks": len(blocks),
        "joint": {"gradients": joint_time / unit, "samples": max(e.samples for e in joint.values())},
    }
    ways = LOOPS if by == "block" else {way: LOOPS[way] for way in ("products", "forms")}
    for way, estimate in ways.items():
        started = time.perf_counter()
        loop = {name: estimate(block) for name, block in blocks.items()}
        spent = time.perf_counter() - started
        result[way] = {
            "gradients": spent / unit,
            "samples": sum(samples for _, samples in loop.values()),
            "cheaper": spent / joint_time,
            "disagreement": max(abs(float(joint[name]) / alone - 1) for name, (alone, _) in loop.items()),
        }
    return result


# Trace and largest eigenvalue


def ours(model: nn.Module, batch: Batch, names: list[str]) -> BlockTable:
    """All traces from the same backward passes; eigenvalues block by block on one kept graph."""
    G = cl.ggn(cl.Problem(model, [batch], cl.losses.CrossEntropy()))[names]
    traces = cl.trace(G, rtol=ACCURACY, by="parameter")
    return {
        name: {
            "trace": float(traces[name]),
            "top": float(cl.eigs(block, 1, tol=TOLERANCE).values[0]),
        }
        for name, block in G.blocks("parameter").items()
    }


def peer(model: nn.Module, batch: Batch, names: list[str]) -> BlockTable:
    """curvlinops, one operator a parameter, everything else held fixed, with the same stopping rules.

    Hutchinson's estimator until the 95 % interval is short enough, and ``eigsh`` with the tolerance that ours has.
    """
    from curvlinops import GGNLinearOperator

    found: BlockTable = {}
    parameters = dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        for name in names:
            operator: Any = GGNLinearOperator(
                model, TokenLoss(), [parameters[name]], [batch], check_deterministic=False
            )
            trace, _ = hutchinson(partial(form, operator), operator.shape[1], parameters[name].dtype)
            top = sla.eigsh(operator.to_scipy(), 1, which="LA", tol=TOLERANCE, return_eigenvectors=False)
            found[name] = {"trace": trace, "top": float(top[0])}
    return found


def table(*, quick: bool) -> dict[str, Any]:
    """Trace and largest eigenvalue of G for each weight matrix: seconds, gradients, how far a peer's differ."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    sizes = QUICK if quick else FEW_TOKENS
    (model, batch), names = model_and_batch(sizes), block_names(sizes)
    unit = min(seconds(lambda: gradient(model, batch)) for _ in range(5))
    result: dict[str, Any] = {"model": str(sizes), "blocks": len(names)}
    tables: dict[str, BlockTable] = {}
    for way, make in {"curvlens": ours, "curvlinops": peer}.items():
        started = time.perf_counter()
        try:
            tables[way] = make(model, batch, names)
        except Exception as error:
            result[way] = {"not_run": reason(error)}
            continue
        result[way] = {"seconds": time.perf_counter() - started}
        result[way]["gradients"] = result[way]["seconds"] / unit
    if len(tables) == 2:
        for what in ("trace", "top"):
            pairs = [(tables["curvlens"][name][what], tables["curvlinops"][name][what]) for name in names]
            result[f"apart_{what}"] = max(abs(a / b - 1) for a, b in pairs)
    return result


# In the report


def targets(results: Results) -> list[Target]:
    """Times cheaper."""
    vector = "a vector for each block, times cheaper than a fresh HVP a block"
    trace = "traces of all {} of G at 5 %, times cheaper than a loop over them"
    return [
        *(
            Target(f"{vector}, {threads(count)}", value(blocks, "cheaper_than_fresh", "median"), VECTORS_TARGET)
            for count, blocks in results["blocks"].items()
        ),
        *(
            Target(trace.format(what), value(results["block_traces"], by, "products", "cheaper"), TRACES_TARGET)
            for by, what in KINDS.items()
        ),
    ]


def vectors_table(results: Results) -> Table:
    """By way."""
    ways = {
        "kept": "curvlens: `H[name] @ v`, one graph for all",
        "fresh": "torch: a fresh HVP a block, v zero elsewhere",
        "pruned": "torch: a fresh double backward by this block only",
    }
    head, rows, notes = ["One vector for each weight matrix"], [[text] for text in ways.values()], []
    for count, blocks in results["blocks"].items():
        if "not_run" in blocks:
            notes.append(f"With {threads(count)} not run: {blocks['not_run']}")
            continue
        head += [f"Sum, {threads(count)}", "kept is cheaper by"]
        for cells, way in zip(rows, ways, strict=True):
            cells.append(f"{blocks[way]['median']:.1f}")
            cells.append("" if way == "kept" else f"{blocks[f'cheaper_than_{way}']['median']:.2f}×")
        notes.append(
            f"{blocks['blocks']} blocks, {len(blocks['kept']['values'])} repetitions, the three ways taking turns by "
            f"block; on the first block they agree to {blocks['disagreement']:.0e} (float32). The cost of "
            "building the kept graph is not in the sum: it is the “once” of the table above."
        )
    return Table("One vector for each block, in gradients", head, rows, notes)


def traces_table(results: Results) -> Table:
    """By kind of block and way."""
    title, data = "Traces of all blocks of G at 5 %", results["block_traces"]
    if "not_run" in data:
        return absent_table(title, data)
    ways = {
        "joint": "curvlens: `trace(G, rtol=0.05, by=…)`",
        "products": "a loop of Hutchinson's estimator, `z @ (G[name] @ z)`",
        "forms": "the same with `G[name].quadratic(z)`, which needs no backward pass to the parameters",
        "deflated": "a loop of curvlens' own, `trace(G[name], rtol=0.05)`",
    }
    rows, worst = [], 0.0
    for by, what in KINDS.items():
        part = data[by]
        for way, label in ways.items():
            if way not in part:
                continue
            cheaper = "" if way == "joint" else f"{part[way]['cheaper']:.1f}×"
            cells = [f"{part[way]['samples']}", f"{part[way]['gradients']:.0f}", cheaper]
            rows.append([f"{part['blocks']} {what}", label, *cells])
            worst = max(worst, part[way].get("disagreement", 0.0))
    notes = [
        f"{data['model']}, float64; all ways share one kept graph. Each goes on until the 95 % intervals of its blocks "
        f"are within 5 %; the estimates of two ways differ by {worst:.1%} at most."
    ]
    return Table(title, ["Blocks", "Way", "samples", "cost in gradients", "joint is cheaper by"], rows, notes)


def table_table(results: Results) -> Table:
    """By library."""
    data = results["block_table"]
    if "not_run" in data:
        return absent_table("Block table", data)
    labels = {
        "curvlens": "curvlens: `trace(G, rtol=0.05, by=…)` and `eigs(G[name], 1, tol=0.01)`",
        "curvlinops": "curvlinops: an operator for each parameter, Hutchinson's estimator and `eigsh`",
    }
    rows = []
    for way, label in labels.items():
        entry = data[way]
        if "not_run" in entry:
            rows.append([label, *absent(entry, 3)])
            continue
        cheaper = "" if way == "curvlens" else f"{entry['seconds'] / data['curvlens']['seconds']:.1f}×"
        rows.append([label, f"{entry['seconds']:.0f}", f"{entry['gradients']:.0f}", cheaper])
    notes = [f"{data['model']}, float32, the {data['blocks']} weight matrices of its layers, 2 threads."]
    if "apart_trace" in data:
        notes[0] += (
            f" The two tables differ by {data['apart_trace']:.1%} in a trace and {data['apart_top']:.1%} in an "
            "eigenvalue at most."
        )
    return Table("Block table: trace at 5 %, λ max at 1 %", ["Way", "s", "gradients", "ours is faster by"], rows, notes)
