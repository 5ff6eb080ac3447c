"""Tables of attention by tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.tables import Table

Results = Mapping[str, Any]
FASTER = {("1", "1024"): 2.5, ("2", "1024"): 2.2, ("1", "4096"): 4.0, ("2", "4096"): 4.0}
SLOWEST = 1 / 1.1
"""At 256 tokens, times as fast as the written-out kernel."""
LESS_MEMORY = 30.0
LONGEST = 1024.0
GROWTH = 2.3


def _faster(results: Results, threads: str, length: str) -> float | None:
    row = results["sdpa"].get(threads, {}).get(length, {"not_run": ""})
    return None if "not_run" in row else float(row["faster"])


def _held(results: Results, key: str) -> float | None:
    row = results["sdpa_memory"][key]
    return None if "not_run" in row else float(row["megabytes"])


def _ratio(results: Results, one: str, other: str) -> float | None:
    a, b = _held(results, one), _held(results, other)
    return None if a is None or b is None else a / b


def targets(results: Results) -> list[tuple[str, float | None, float, bool]]:
    """(what, measured, limit, whether it is an upper limit)."""
    name = "second derivative of attention by tiles, times faster than torch's written-out kernel"
    rows: list[tuple[str, float | None, float, bool]] = [
        (f"{name}, {length} tokens, {_threads(threads)}", _faster(results, threads, length), limit, False)
        for (threads, length), limit in FASTER.items()
    ]
    rows += [
        (f"{name}, 256 tokens, {_threads(threads)}", _faster(results, threads, "256"), SLOWEST, False)
        for threads in results["sdpa"]
    ]
    return [
        *rows,
        ("its memory, times less, 4096 tokens", _ratio(results, "math 4096", "tiles 4096"), LESS_MEMORY, False),
        ("its memory at 8192 tokens, 12 heads, MiB", _held(results, "tiles 8192, 12 heads"), LONGEST, True),
        (
            "its memory, 8192 over 4096 tokens",
            _ratio(results, "tiles 8192, 12 heads", "tiles 4096, 12 heads"),
            GROWTH,
            True,
        ),
    ]


def tables(results: Results) -> list[Table]:
    """Time, memory, and a whole model."""
    return [_times(results), _memory(results), _model(results)]


def _threads(count: str) -> str:
    return f"{count} thread" if count == "1" else f"{count} threads"


def _times(results: Results) -> Table:
    rows = []
    for threads, lengths in results["sdpa"].items():
        for length, row in lengths.items():
            if "not_run" in row:
                rows.append([length, "", threads, f"not run: {row['not_run']}", "", "", "", ""])
                continue
            both = [f"{row['seconds'][key]:.3f}" for key in ("tiles", "math")]
            share = f"{row['share']:.0%}"
            rows.append([length, str(row["heads"]), threads, *both, f"{row['faster']:.1f}", share, f"{row['off']:.0e}"])
    head = ["Tokens", "heads", "threads", "ours, s", "math, s", "times faster", "share of peak", "apart"]
    notes = [
        "Forward pass, gradient, and derivative of the gradient along a direction, all together; causal, head size 64, "
        "float32, `SDPBackend.MATH` beside. Ours is by tiles above 256 keys and written out below. Share of peak: the "
        "operations that a causal mask leaves (19 products of matrices), per second, over those of a product of two "
        "matrices 2048 x 2048 with as many threads."
    ]
    return Table("Second derivative of attention", head, rows, notes)


def _memory(results: Results) -> Table:
    rows = []
    for key, row in results["sdpa_memory"].items():
        way = "by tiles" if key.startswith("tiles") else "SDPBackend.MATH"
        cells = [way, key.split()[1].rstrip(",")]
        rows.append(
            [*cells, *(["not run", ""] if "not_run" in row else [str(row["heads"]), f"{row['megabytes']:.0f}"])]
        )
    notes = ["Peak above inputs and direction, each in a process of its own; one thread."]
    return Table("Memory of a second derivative of attention", ["Way", "tokens", "heads", "MiB"], rows, notes)


def _model(results: Results) -> Table:
    rows = []
    for way, row in results["long_context"].items():
        name = "attention by tiles" if way == "tiles" else "SDPBackend.MATH"
        if "not_run" in row:
            rows.append([name, f"not run: {row['not_run']}", "", ""])
        else:
            rows.append([name, f"{row['seconds']:.1f}", f"{row['gradients']:.1f}", f"{row['megabytes']:.0f}"])
    notes = ["6 layers, d 384, 6 heads, one sequence of 2048 tokens, two threads; reverse over reverse from nothing."]
    return Table("A product with H at 2048 tokens", ["Attention", "seconds", "gradients", "MiB"], rows, notes)
