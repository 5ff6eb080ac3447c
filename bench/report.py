"""From measurements to tables: costs, blocks, memory, correctness, targets; spectra are in `report_spectra`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import report_attention, report_attribution, report_sdpa, report_spectra
from bench.correctness import EXACT, PADDINGS
from bench.methods import METHODS, Method
from bench.tables import Table
from bench.timing import GRADIENT

TARGETS = (("ours-h", "H v", 2.6), ("ours-g", "G v", 1.6))
BLOCKS_TARGET = 4.0
TRACES_TARGET = 10.0
MEMORY_TARGET = 0.2

Results = Mapping[str, Any]


def tables(results: Results) -> list[Table]:
    """All tables, in reading order."""
    return [
        _targets(results),
        _costs(results),
        _blocks(results),
        _memory(results),
        _correctness(results),
        *report_spectra.tables(results),
        *report_attention.tables(results),
        *report_attribution.tables(results),
        *report_sdpa.tables(results),
    ]


def _name(method: Method) -> str:
    return f"{method.library}: {method.label} ({method.kind})"


def _row(table: Any, key: str) -> Mapping[str, Any]:
    """What was measured for a row; a process that failed as a whole speaks for all its rows."""
    row: Mapping[str, Any] = table if "not_run" in table else table["rows"][key]
    return row


def _targets(results: Results) -> Table:
    rows = []
    for threads, table in results["timing"].items():
        for key, name, limit in TARGETS:
            row = _row(table, key)
            value = None if "not_run" in row else row["ratio"]["median"]
            rows.append(_target(f"{name}, graph kept, {_threads(threads)}", value, f"≤ {limit}", limit, below=True))
    for threads, blocks in results["blocks"].items():
        value = None if "not_run" in blocks else blocks["cheaper_than_fresh"]["median"]
        name = f"a vector for each block, times cheaper than a fresh HVP a block, {_threads(threads)}"
        rows.append(_target(name, value, f"≥ {BLOCKS_TARGET:g}", BLOCKS_TARGET, below=False))
    block_traces = results["block_traces"]
    for by, what in (("parameter", "parameters"), ("block", "blocks by layer and role")):
        value = None if "not_run" in block_traces else block_traces[by]["products"]["cheaper"]
        name = f"traces of all {what} of G at 5 %, times cheaper than a loop over them"
        rows.append(_target(name, value, f"≥ {TRACES_TARGET:g}", TRACES_TARGET, below=False))
    off = [
        None if "not_run" in row else abs(row["real"] / row["announced"] - 1) for row in results["announced"].values()
    ]
    worst = None if None in off else max(x for x in off if x is not None)
    rows.append(
        _target("announced against real memory, relative", worst, f"≤ {MEMORY_TARGET:g}", MEMORY_TARGET, below=True)
    )
    more = (report_spectra, report_attention, report_attribution, report_sdpa)
    for name, value, limit, below in (row for report in more for row in report.targets(results)):
        rows.append(_target(name, value, f"{'≤' if below else '≥'} {limit:g}", limit, below=below))
    return Table("Targets", ["What (cost in gradients)", "Measured", "Target", "Result"], rows)


def _target(name: str, value: float | None, wanted: str, limit: float, *, below: bool) -> list[str]:
    if value is None:
        return [name, "not run", wanted, "fail"]
    return [name, f"{value:.2f}", wanted, "pass" if (value <= limit if below else value >= limit) else "fail"]


def _threads(count: str) -> str:
    return f"{count} thread{'' if count == '1' else 's'}"


def _costs(results: Results) -> Table:
    head = ["Product"]
    for threads in results["timing"]:
        head += [f"Cost, {_threads(threads)}", "quartiles", "once"]
    rows = []
    for method in METHODS:
        if not method.timed:
            continue
        cells = [_name(method)]
        for table in results["timing"].values():
            row = _row(table, method.key)
            if "not_run" in row:
                cells += [f"not run: {row['not_run']}", "", ""]
                continue
            low, high = row["ratio"]["quartiles"]
            cells += [f"{row['ratio']['median']:.2f}", f"{low:.2f}–{high:.2f}", f"{row['once']:+.1f} {method.once}"]
        rows.append(cells)
    units = ", ".join(
        f"{table['gradient_seconds']['median']:.3f} s with {_threads(threads)}"
        for threads, table in results["timing"].items()
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


def _blocks(results: Results) -> Table:
    ways = {
        "kept": "curvlens: `H[name] @ v`, one graph for all",
        "fresh": "torch: a fresh HVP a block, v zero elsewhere",
        "pruned": "torch: a fresh double backward by this block only",
    }
    head, rows, notes = ["One vector for each weight matrix"], [[text] for text in ways.values()], []
    for threads, blocks in results["blocks"].items():
        if "not_run" in blocks:
            notes.append(f"With {_threads(threads)} not run: {blocks['not_run']}")
            continue
        head += [f"Sum, {_threads(threads)}", "kept is cheaper by"]
        for cells, way in zip(rows, ways, strict=True):
            cells.append(f"{blocks[way]['median']:.1f}")
            cells.append("" if way == "kept" else f"{blocks[f'cheaper_than_{way}']['median']:.2f}×")
        notes.append(
            f"{blocks['blocks']} blocks, {len(blocks['kept']['values'])} repetitions, the three ways taking turns by "
            f"block; on the first block they agree to {blocks['disagreement']:.0e} (float32). The cost of "
            "building the kept graph is not in the sum: it is the “once” of the table above."
        )
    return Table("One vector for each block, in gradients", head, rows, notes)


def _memory(results: Results) -> Table:
    base = results["memory"][GRADIENT]
    rows = [["one gradient", *_megabytes(base, base)]]
    rows += [[_name(method), *_megabytes(results["memory"][method.key], base)] for method in METHODS if method.timed]
    reset = all(row.get("reset", True) for row in results["memory"].values())
    notes = [
        "Each row in a process of its own: the peak of resident memory while it is built and multiplies twice, above "
        "what the process held before with model, vector and libraries loaded and one gradient done. Freed blocks of "
        "64 KiB and more go back to the system at once, so that this is live memory; a kept graph is in it."
    ]
    if not reset:
        notes.append("The peak could not be reset on this system: figures are growth above the gradient's own peak.")
    return Table("Peak memory", ["Product", "MiB", "in gradients"], rows, notes)


def _megabytes(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    if "not_run" in row:
        return [f"not run: {row['not_run']}", ""]
    known = base.get("megabytes")
    return [f"{row['megabytes']:.0f}", f"{row['megabytes'] / known:.2f}" if known else ""]


def _correctness(results: Results) -> Table:
    head = ["Product", "norm rows", "norm rows (differences)", "other rows", "2+2 padded", "3+1", "3+1 padded", "fused"]
    rows = []
    data = results["correctness"]
    for method in METHODS:
        row = _row(data, method.key)
        if "not_run" in row:
            rows.append([_name(method), f"not run: {row['not_run']}", *[""] * 6])
            continue
        others = max(error for group, error in row["dense"].items() if group != "norm")
        errors = [row["dense"]["norm"], row["differences"]["norm"], others]
        changes = [row[key] for key in ("padded_2_2", "ragged_3_1", "padded_3_1")]
        rows.append([_name(method), *map(_error, errors), *map(_changes, changes), _fused(row["fused"])])
    differ = [error for groups in data.get("truths_differ", {}).values() for error in groups.values()]
    paddings = " / ".join(f"{', '.join(map(str, valid))} ({name})" for name, valid in PADDINGS.items())
    notes = [
        "Float64, 2-layer GPT of width 8, every parameter tensor by itself. “norm rows”: largest relative error over "
        "the weights and biases of LayerNorm, against a dense reverse-over-reverse Hessian (GGN: dense Jᵀ Λ J) and "
        "against central differences of the gradient. “other rows”: the same over all other parameters, dense.",
        f"The two truths differ by {max(differ, default=0.0):.0e} at most, which bounds the second column.",
        "“2+2”, “3+1”: relative change of the product when four samples come as two batches, with mean reduction; "
        f"“padded” for two sets of valid labels, the rest -100: {paddings}. “one batch”: takes no more than one.",
        "“fused”: does it run on a model that calls `F.scaled_dot_product_attention`, without help.",
    ]
    return Table("Correctness", head, rows, notes)


def _changes(values: list[float | None]) -> str:
    return " / ".join(_error(value) for value in values if value is not None) or "one batch"


def _error(value: float) -> str:
    return f"{value:.0e}" if value < EXACT else f"**{value:.1%}**"


def _fused(text: str) -> str:
    if text == "runs":
        return "runs"
    if "forward AD" in text:
        return "raises: no forward derivative"
    if "derivative for" in text:
        return "raises: no double backward"
    return text
