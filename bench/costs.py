"""Costs of a product and of a profile: time in gradients, and peak memory."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import curvlens as cl
from bench.measuring import peak, peak_reset, peak_since, reason, seconds, spread
from bench.methods import BY_KEY, METHODS, Product
from bench.model import FULL, QUICK, SMALL, count, gradient, join, model_and_batch
from bench.tables import Results, Table, Target, absent, absent_table, threads, value
from curvlens._evaluation.recordings import Recordings

GRADIENT = "gradient"
TIMED = [method for method in METHODS if method.timed]
SAMPLES = 8
PRODUCT_TARGETS = {"ours-h": ("H v", 2.6), "ours-g": ("G v", 1.6)}
PROBE_TARGET = 8.0
PROFILE_MEMORY_TARGET = 3.0
DIRECTION_TARGETS = {"block": 2.6, "module": 5.0}


# A product


def product_time(*, quick: bool, repetitions: int) -> dict[str, Any]:
    """Time of the gradient, and for each row its time in gradients, per product and once."""
    model, batch = model_and_batch(QUICK if quick else FULL)
    v = torch.randn(count(model))

    def unit() -> float:
        return seconds(lambda: gradient(model, batch))

    for _ in range(2):
        unit()
    # The first double backward of a process loads kernels and pages; nobody's first product shall pay for it.
    BY_KEY["func-vjp-grad"].build(model, [batch])(v)

    rows: dict[str, Any] = {}
    products: dict[str, Product] = {}
    for method in TIMED:
        rows[method.key] = {}
        nearby = unit()  # not the median of all: the load of the machine changes over minutes
        start = time.perf_counter()
        try:
            product = method.build(model, [batch])
            product(v)
        except Exception as error:
            rows[method.key]["not_run"] = reason(error)
            continue
        first = time.perf_counter() - start
        rows[method.key]["once"] = (first - seconds(lambda product=product: product(v))) / nearby  # type: ignore[misc]
        products[method.key] = product

    times: dict[str, list[float]] = {GRADIENT: [], **{key: [] for key in products}}
    work: dict[str, list[float]] = {key: [] for key in times}
    gc.disable()
    for _ in range(repetitions):
        for key in times:
            start = time.process_time()
            times[key].append(unit() if key == GRADIENT else seconds(lambda key=key: products[key](v)))  # type: ignore[misc]
            work[key].append(time.process_time() - start)
        gc.collect()

    units = times[GRADIENT]
    for key in products:
        rows[key]["ratio"] = spread([t / g for t, g in zip(times[key], units, strict=True)])
        # Processor time does not count waiting for a busy core: far from the ratio above, the run was disturbed.
        rows[key]["processor_ratio"] = spread([t / g for t, g in zip(work[key], work[GRADIENT], strict=True)])
        rows[key]["seconds"] = median(times[key])
    busy = [w / t for w, t in zip(work[GRADIENT], units, strict=True)]
    return {"gradient_seconds": spread(units), "gradient_cores": spread(busy), "rows": rows}


def product_memory(*, quick: bool, key: str) -> dict[str, Any]:
    """Megabytes of the highest point while one row is built and multiplies twice.

    Above what the process held before, with model, vector, one gradient and the libraries loaded; and whether the peak
    could be reset to that (otherwise the growth of the maximum).
    """
    model, batch = model_and_batch(QUICK if quick else FULL)
    v = torch.randn(count(model))
    gradient(model, batch)
    try:
        if key != GRADIENT:  # the libraries' own imports are no cost of a product
            small, tokens = model_and_batch(SMALL)
            BY_KEY[key].build(small, [tokens])(torch.zeros(count(small)))
        before = peak_reset()
        product: Product = (
            (lambda _: join(gradient(model, batch))) if key == GRADIENT else BY_KEY[key].build(model, [batch])
        )
        product(v)
        product(v)
    except Exception as error:
        return {"not_run": reason(error)}
    return {"megabytes": peak_since(before), "reset": before[1]}


def product_targets(results: Results) -> list[Target]:
    """H v and G v, by threads."""
    return [
        Target(f"{name}, graph kept, {threads(n)}", value(row_of(table, key), "ratio", "median"), limit, below=True)
        for n, table in results["timing"].items()
        for key, (name, limit) in PRODUCT_TARGETS.items()
    ]


def row_of(table: Results, key: str) -> Results:
    """What was measured for a row; a process that failed as a whole speaks for all its rows."""
    row: Results = table if "not_run" in table else table["rows"][key]
    return row


def product_table(results: Results) -> Table:
    """Time of all rows."""
    head = ["Product"]
    for n in results["timing"]:
        head += [f"Cost, {threads(n)}", "quartiles", "once"]
    rows = []
    for method in TIMED:
        cells = [method.name]
        for table in results["timing"].values():
            row = row_of(table, method.key)
            if "not_run" in row:
                cells += absent(row, 3)
                continue
            low, high = row["ratio"]["quartiles"]
            cells += [f"{row['ratio']['median']:.2f}", f"{low:.2f}–{high:.2f}", f"{row['once']:+.1f} {method.once}"]
        rows.append(cells)
    units = ", ".join(
        f"{table['gradient_seconds']['median']:.3f} s with {threads(n)}"
        for n, table in results["timing"].items()
        if "not_run" not in table
    )
    notes = [
        f"Unit: one gradient of all parameters, forward and backward with torch's fused attention ({units}).",
        f"Median over {results['repetitions']} repetitions of the row's time over the gradient's time in the same "
        "repetition; all rows take turns in one process. “once” is what construction and first product cost "
        "above the second product, in one gradient timed just before: a single sample, so a rough one.",
        "All rows but those of curvlens run inside `sdpa_kernel(SDPBackend.MATH)`, without which they fail.",
    ]
    return Table("Cost of one product, in gradients", head, rows, notes)


def product_memory_table(results: Results) -> Table:
    """Memory of all rows."""
    data = results["memory"]
    base = data[GRADIENT].get("megabytes")

    def cells(row: Results) -> list[str]:
        if "not_run" in row:
            return absent(row, 2)
        return [f"{row['megabytes']:.0f}", f"{row['megabytes'] / base:.2f}" if base else ""]

    rows = [["one gradient", *cells(data[GRADIENT])], *([method.name, *cells(data[method.key])] for method in TIMED)]
    notes = [
        "Each row in a process of its own: the peak of resident memory while it is built and multiplies twice, above "
        "what the process held before with model, vector and libraries loaded and one gradient done. Freed blocks of "
        "64 KiB and more go back to the system at once, so that this is live memory; a kept graph is in it."
    ]
    if not all(row.get("reset", True) for row in data.values()):
        notes.append("The peak could not be reset on this system: figures are growth above the gradient's own peak.")
    return Table("Peak memory", ["Product", "MiB", "in gradients"], rows, notes)


# A profile


def profile_time(*, quick: bool, repetitions: int = 5) -> dict[str, Any]:
    """Gradients for each probe of a whole profile, and for its steps; all take turns with the gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)  # float32 is announced
    model, batch = model_and_batch(QUICK if quick else FULL)
    problem = cl.Problem(model, batch, cl.losses.CrossEntropy())
    H, recordings = cl.hessian(problem), Recordings(problem._evaluation)  # a profile builds its own
    z = torch.randn(problem.layout.size)
    parts = problem.layout.unflatten(z)
    H @ z
    recordings.known()

    def forms(bent: int) -> Callable[[], object]:
        return lambda: [recording.forms([parts], bent) for recording in recordings]

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "profile": (lambda: cl.profile(problem, samples=SAMPLES, top=False), SAMPLES),
        "build": (lambda: Recordings(problem._evaluation).known(), 1),
        "product": (lambda: H @ z, 1),
        "probe": (forms(1), 1),
        "tangent": (forms(0), 1),
    }
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for way, _ in ways.values():
        way()
    for _ in range(2 if quick else repetitions):
        for name, (way, samples) in ways.items():
            unit = min(seconds(lambda: gradient(model, batch)) for _ in range(2))
            costs[name].append(seconds(way) / samples / unit)
    profile = cl.profile(problem, samples=4, top=False)
    return {
        **{name: median(values) for name, values in costs.items()},
        "samples": SAMPLES,
        "rows": len(profile),
        "mismatch": profile.mismatch,
    }


def profile_memory(*, quick: bool, key: str) -> dict[str, Any]:
    """MiB of a profile, or of one product with H, above what the process held with model, data and one gradient."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)

    def use(problem: cl.Problem) -> None:
        if key == "profile":
            cl.profile(problem, samples=SAMPLES, top=False)
        else:
            cl.hessian(problem) @ torch.zeros(problem.layout.size)

    loss = cl.losses.CrossEntropy()
    use(cl.Problem(*model_and_batch(SMALL), loss))  # kernels and imports are no cost of it
    model, batch = model_and_batch(QUICK if quick else FULL)
    gradient(model, batch)
    problem = cl.Problem(model, batch, loss)
    return {"megabytes": peak(lambda: use(problem))}


def profile_targets(results: Results) -> list[Target]:
    """A probe, and memory."""
    profile, product = (value(results["attribution_memory"][key], "megabytes") for key in ("profile", "product"))
    held = None if profile is None or product is None else profile / product
    return [
        Target(
            "one probe of a profile, over all modules", value(results["attribution"], "profile"), PROBE_TARGET, True
        ),
        Target("memory of a profile, in products with H", held, PROFILE_MEMORY_TARGET, True),
    ]


def profile_table(results: Results) -> Table:
    """What a probe costs, and what of it is what."""
    data, memory = results["attribution"], results["attribution_memory"]
    title, head = "A profile", ["Step", "gradients", "peak memory"]
    if "not_run" in data:
        return absent_table(title, data, head)
    held = {key: f"{row['megabytes']:.0f} MiB" if "not_run" not in row else "not run" for key, row in memory.items()}
    rows = [
        [f"**a probe, of {data['samples']} in a profile, all in all**", f"**{data['profile']:.1f}**", held["profile"]],
        ["cut forward pass and adjoints, once a profile", f"{data['build']:.1f}", ""],
        ["product with H, by which the sum is checked", f"{data['product']:.1f}", held["product"]],
        ["tangents along a probe, and second derivatives of all modules", f"{data['probe']:.1f}", ""],
        ["tangents along H times a probe", f"{data['tangent']:.1f}", ""],
    ]
    notes = [
        f"{data['rows']} rows; they add up to the quadratic form of H within {data['mismatch']:.0e} of the sum of "
        "their sizes, in float32."
    ]
    return Table(title, head, rows, notes)


# Attribution along a direction


def direction_time(*, quick: bool, repetitions: int = 5) -> dict[str, Any]:
    """Gradients for uᵀHu by block, by block and module, and by module with the product known; all take turns."""
    warnings.simplefilter("ignore", cl.CurvlensWarning)
    model, batch = model_and_batch(QUICK if quick else FULL)
    problem = cl.Problem(model, batch, cl.losses.CrossEntropy())
    u = torch.randn(problem.layout.size)
    Hu = cl.hessian(problem) @ u
    ways: dict[str, Callable[[], object]] = {
        "block": lambda: cl.attribute(problem, u),
        "head": lambda: cl.attribute(problem, u, by="head"),
        "both": lambda: cl.attribute(problem, u, modules=True),
        "module": lambda: cl.attribute(problem, u, modules=True, product=Hu),
    }
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(2 if quick else repetitions):
        for name, way in ways.items():
            unit = min(seconds(lambda: gradient(model, batch)) for _ in range(2))
            costs[name].append(seconds(way) / unit)
    found = cl.attribute(problem, u, modules=True)
    apart = abs(sum(float(part) for part in found.blocks.values()) - found.total) / abs(found.total)
    return {**{name: median(values) for name, values in costs.items()}, "apart": apart, "mismatch": found.mismatch}


def direction_targets(results: Results) -> list[Target]:
    """By block, and by module."""
    data = results.get("direction", {"not_run": ""})
    return [
        Target(
            f"attribution along a direction, by {name}",
            value(data, name),
            limit,
            True,
        )
        for name, limit in DIRECTION_TARGETS.items()
    ]


def direction_table(results: Results) -> Table:
    """What an attribution along one direction costs."""
    title, head = "Attribution along a direction", ["`cl.attribute(problem, u, …)`", "gradients"]
    data = results.get("direction", {"not_run": "not measured yet"})
    if "not_run" in data:
        return absent_table(title, data, head)
    rows = [
        ["by block: one product", f"{data['block']:.2f}"],
        ['by head, `by="head"`', f"{data['head']:.2f}"],
        ["by module, with `product=` known: adjoints and tangents", f"{data['module']:.2f}"],
        ["by block and by module", f"{data['both']:.2f}"],
    ]
    notes = [
        f"Repeated calls, graphs kept. The blocks add up to uᵀHu within {data['apart']:.0e} of it, the modules within "
        f"{data['mismatch']:.0e} of the sum of their sizes, in float32."
    ]
    return Table(title, head, rows, notes)
