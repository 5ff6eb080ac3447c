"""Tables of the closed-form Hessian of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.tables import Table

Results = Mapping[str, Any]

DENSE_TARGETS = {"17": 10.0, "64": 40.0, "128": 100.0}
PRODUCT_TARGET = 4.0
NORMS_TARGET = 20.0
MEMORY_TARGET = 3.0


def targets(results: Results) -> list[tuple[str, float | None, float, bool]]:
    """(what, measured, limit, whether it is an upper limit)."""
    rows: list[tuple[str, float | None, float, bool]] = []
    data = results["attention"]
    for length, limit in DENSE_TARGETS.items():
        row = data.get(length, {"not_run": ""})
        value = None if "not_run" in row else row["dense_faster"]
        rows.append(
            (f"closed-form attention Hessian, {length} tokens, times faster than torch.func", value, limit, False)
        )
    ran = all("not_run" not in row for row in data.values())
    least = min(row["product_faster"] for row in data.values()) if ran else None
    rows.append(
        ("its product, times faster than a double backward (least of all lengths)", least, PRODUCT_TARGET, False)
    )
    norms = results["attention_norms"]
    ratios = [
        None if "not_run" in norms or "not_run" in norms[dtype] else norms[dtype]["faster"]
        for dtype in ("float32", "float64")
    ]
    slowest = None if None in ratios else min(ratio for ratio in ratios if ratio is not None)
    rows.append(("block norms, times faster than 20 probes with curvlinops", slowest, NORMS_TARGET, False))
    memory = results["attention_memory"]
    blocks = None if "not_run" in memory else (memory["megabytes"] - memory["output"]) / memory["block"]
    rows.append(("memory of the assembly beyond its output, in blocks", blocks, MEMORY_TARGET, True))
    return rows


def tables(results: Results) -> list[Table]:
    """Dense matrix and product, norms, memory."""
    return [_dense(results["attention"]), _norms(results["attention_norms"])]


def _dense(data: Results) -> Table:
    title = "Closed-form Hessian of attention"
    head = [
        "Tokens",
        "dense",
        "torch.func.hessian",
        "faster by",
        "product",
        "double backward",
        "faster by",
        "graph kept",
    ]
    rows = []
    for length, row in data.items():
        if "not_run" in row:
            rows.append([length, f"not run: {row['not_run']}", *[""] * 6])
            continue
        rows.append(
            [
                length,
                f"{row['dense'] * 1e3:.2f} ms",
                f"{row['dense_torch'] * 1e3:.1f} ms",
                f"{row['dense_faster']:.1f}×",
                f"{row['product'] * 1e6:.0f} µs",
                f"{row['product_fresh'] * 1e6:.0f} µs",
                f"{row['product_faster']:.1f}×",
                f"{row['product_kept'] * 1e6:.0f} µs",
            ]
        )
    worst = max((row["disagreement"] for row in data.values() if "not_run" not in row), default=0.0)
    notes = [
        "One sample, d_V = d_K = 16, float64, square loss, one thread, a process for each length; all ways take turns, "
        "a ratio is the median of the turns' ratios. “double backward” builds the gradient's graph for each product, "
        f"“graph kept” has it. The dense matrices agree to {worst:.0e}."
    ]
    return Table(title, head, rows, notes)


def _norms(data: Results) -> Table:
    title = "Norms of the Q and V blocks of H, outer and functional part"
    head = ["Precision", "closed form, exact", "20 probes with curvlinops", "faster by", "error of the probes"]
    if "not_run" in data:
        return Table(title, head, [["not run", str(data["not_run"]), "", "", ""]])
    rows = []
    for dtype, row in data.items():
        if "not_run" in row:
            rows.append([dtype, f"{row['exact']:.3f} s", f"not run: {row['not_run']}", "", ""])
            continue
        off = max(abs(value) for value in row["off"].values())
        times = [f"{row['exact']:.3f} s", f"{row['probes']:.2f} s", f"{row['faster']:.0f}×"]
        rows.append([dtype, *times, f"up to {off:.0%}"])
    notes = [
        "The paper's Figure 3a: causal attention, skip, ReLU MLP, skip, unembedding, cross-entropy; d = 128, 64 "
        "sequences of 17 tokens, 2 threads. Both ways start at the weights; H − G gives the probes' functional part."
    ]
    return Table(title, head, rows, notes)
