"""Tables of eigenvalues, traces and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.tables import Table

Results = Mapping[str, Any]
SEARCH_TIME, SEARCH_MEMORY = 1.3, 0.2


def tables(results: Results) -> list[Table]:
    """In reading order."""
    whole = [
        _traces(results),
        _eigenvalues(results),
        _block_traces(results),
        _block_table(results),
        _announced(results),
    ]
    return [*whole, _search(results["search"])] if "search" in results else whole


def targets(results: Results) -> list[tuple[str, float | None, float, bool]]:
    """(what, measured, limit, whether it has to be below)."""
    if "search" not in results:
        return []
    timed, held = results["search"]["time"], results["search"]["memory"]
    over = None if "not_run" in timed else timed["seconds"] / timed["seconds of products"]
    more = None if "not_run" in held else held["real"] / held["announced"] - 1
    return [
        ("time of eigs over that of its products, long vectors", over, SEARCH_TIME, True),
        ("memory of eigs beyond what it announced, long vectors, relative", more, SEARCH_MEMORY, True),
    ]


def _failed(title: str, why: str) -> Table:
    return Table(title, ["", ""], [["not run", why]])


def _grid(title: str, data: Mapping[str, Any], first: str, notes: list[str]) -> Table:
    """One row a method, one column a matrix."""
    if "not_run" in data:
        return _failed(title, str(data["not_run"]))
    methods = [key for key in next(iter(data.values())) if key != "rows"]
    head = [first, *(f"{name} ({column['rows']} rows)" for name, column in data.items())]
    rows = [[method, *(_cell(column[method]) for column in data.values())] for method in methods]
    return Table(title, head, rows, notes)


def _cell(entry: Mapping[str, Any]) -> str:
    if "not_run" in entry:
        return f"not run: {entry['not_run']}"
    if entry["products"] is None:
        return "more than rows"
    good = f", good in {entry['good']:.0%}" if "good" in entry else ""
    return f"{entry['products']:.0f}{good}"


def _traces(results: Results) -> Table:
    notes = [
        "Products for a trace that is right to 1 % in 95 of 100 runs. Rows with a fixed number of products: "
        "the smallest of a grid (6, 12, 18, …, growing by a quarter) with which 38 of 40 seeds were good; a "
        "user cannot know it beforehand. Rows that stop by themselves: products on average, and the share of "
        "good results. “more than rows”: not even that many products suffice, and the dense matrix would be "
        "cheaper."
    ]
    return _grid("Products for a trace at 1 %", results["traces"], "Estimator", notes)


def _eigenvalues(results: Results) -> Table:
    notes = [
        "Products for the five largest eigenvalues, each to 1e-4, repeated ones as often as they are "
        "repeated: the cheapest setting of each solver (tolerance, or number of steps) with which 5 of 5 "
        "seeds were good. curvlens' count includes one product for the residual of each vector and, in the "
        "first row, the search for hidden copies; the others report no residual from a product. “more than "
        "rows”: no setting was good."
    ]
    return _grid("Products for the five largest eigenvalues at 1e-4", results["eigenvalues"], "Solver", notes)


def _block_traces(results: Results) -> Table:
    title, data = "Traces of all blocks of G at 5 %", results["block_traces"]
    if "not_run" in data:
        return _failed(title, str(data["not_run"]))
    ways = {
        "joint": "curvlens: `trace(G, rtol=0.05, by=…)`",
        "products": "a loop of Hutchinson's estimator, `z @ (G[name] @ z)`",
        "forms": "the same with `G[name].quadratic(z)`, which needs no backward pass to the parameters",
        "deflated": "a loop of curvlens' own, `trace(G[name], rtol=0.05)`",
    }
    rows, worst = [], 0.0
    for by, what in (("parameter", "parameters"), ("block", "blocks by layer and role")):
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


def _block_table(results: Results) -> Table:
    data = results["block_table"]
    if "not_run" in data:
        return _failed("Block table", str(data["not_run"]))
    labels = {
        "curvlens": "curvlens: `trace(G, rtol=0.05, by=…)` and `eigs(G[name], 1, tol=0.01)`",
        "curvlinops": "curvlinops: an operator for each parameter, Hutchinson's estimator and `eigsh`",
    }
    rows = []
    for way, label in labels.items():
        entry = data[way]
        if "not_run" in entry:
            rows.append([label, f"not run: {entry['not_run']}", "", ""])
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


def _announced(results: Results) -> Table:
    rows = []
    for budget, row in results["announced"].items():
        if "not_run" in row:
            rows.append([budget, f"not run: {row['not_run']}", "", "", ""])
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


def _search(runs: Mapping[str, Any]) -> Table:
    """The largest eigenvalue over long vectors."""
    rows = []
    for what, row in runs.items():
        if "not_run" in row:
            return _failed("A search over long vectors", str(row["not_run"]))
        cells = ("products", "basis", "seconds", "seconds of products", "announced", "real")
        rows.append([what, *(f"{row[cell]:.0f}" for cell in cells)])
    notes = [
        f"`eigs(H, 1, tol=1e-2)` over {runs['time']['parameters'] / 1e6:.0f} million parameters and 128 tokens, 2 "
        "threads, memory in MiB above the model with its gradients. Memory is measured in a run of its own, which "
        "gives freed memory back at once and is slower."
    ]
    head = ["Run", "products", "basis vectors", "s", "s of products", "announced", "real"]
    return Table("A search over long vectors", head, rows, notes)
