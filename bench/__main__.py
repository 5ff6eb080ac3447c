"""``python -m bench``: measure, print, and write RESULTS.md and results.json."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import analysis, attention, costs, report, sdpa, search
from bench.measuring import RETURN_FREED, run
from bench.model import FULL, QUICK

console = Console()


def sections(*, quick: bool, repetitions: int, block_repetitions: int) -> dict[str, Callable[[], Any]]:
    """What is measured, by the name under which it is kept."""
    cores = min(2, os.cpu_count() or 1)

    def child(function: str, threads: int = cores, **options: Any) -> Any:
        return run(function, threads=threads, quick=quick, **options)

    def held(function: str, threads: int = cores, **options: Any) -> Any:
        return child(function, threads, environment=RETURN_FREED, **options)

    each = range(1, cores + 1)
    rows = [costs.GRADIENT, *(method.key for method in costs.TIMED)]
    lengths, tiled = attention.LENGTHS[: 1 if quick else None], list(sdpa.LENGTHS)[: 3 if quick else None]
    budgets = analysis.QUICK_TIMES if quick else analysis.TIMES
    return {
        "timing": lambda: {str(n): child("costs.product_time", n, repetitions=repetitions) for n in each},
        "blocks": lambda: {str(cores): child("blocks.vectors", repetitions=block_repetitions)},
        "memory": lambda: {key: held("costs.product_memory", key=key) for key in rows},
        "correctness": lambda: run("correctness.measure", threads=1),
        "traces": lambda: child("spectra.traces", 1),
        "eigenvalues": lambda: child("spectra.eigenvalues", 1),
        "block_traces": lambda: child("blocks.traces"),
        "block_table": lambda: child("blocks.table"),
        "attention": lambda: {str(n): child("attention.dense", 1, length=n) for n in lengths},
        "attention_norms": lambda: child("attention.norms"),
        "attention_memory": lambda: held("attention.memory", 1),
        "assembly": lambda: child("assembly.measure", 1),
        "attribution": lambda: child("costs.profile_time"),
        "attribution_memory": lambda: {key: held("costs.profile_memory", key=key) for key in ("product", "profile")},
        "direction": lambda: child("costs.direction_time"),
        "sdpa": lambda: {str(n): {str(length): child("sdpa.time", n, length=length) for length in tiled} for n in each},
        "sdpa_memory": lambda: {key: held("sdpa.memory", 1, key=key) for key in sdpa.MEMORY_ROWS},
        "long_context": lambda: {way: held("sdpa.whole_model", way=way) for way in sdpa.WAYS},
        "announced": lambda: {budget: held("search.announced", budget=budget) for budget in search.BUDGETS},
        "analysis": lambda: {
            "time": {name: child("analysis.planned", 1, name=name) for name in analysis.MODELS},
            "memory": {name: held("analysis.planned", 1, name=name) for name in analysis.MODELS},
            "budgets": {budget: child("analysis.timed", 1, budget=budget) for budget in budgets},
            "course": child("analysis.course", 1),
        },
        "search": lambda: {"time": child("search.largest"), "memory": held("search.largest")},
    }


def measure(wanted: dict[str, Callable[[], Any]], model: str, repetitions: int) -> dict[str, Any]:
    """One process after the other: two at a time would disturb each other."""
    started = time.time()
    results: dict[str, Any] = {
        "model": model,
        "repetitions": repetitions,
        "machine": report.facts(),
        "versions": report.versions(),
        "load": report.load(),
    }
    for name, section in wanted.items():
        console.print(f"{name} …")
        results[name] = section()
    return {**results, "minutes": (time.time() - started) / 60}


def _processor(machine: dict[str, Any]) -> str:
    return f"{machine['processor']} ({machine['vector instructions']})"


def main() -> None:
    """Parse, measure, show, write."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few repetitions, to see that it runs")
    parser.add_argument("--repetitions", type=int, help="of each product (9; quick: 3)")
    parser.add_argument("--block-repetitions", type=int, help="of the blocks (3; quick: 1)")
    parser.add_argument("--out", type=Path, help="folder of RESULTS.md and results.json (bench; quick: build/bench)")
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="measure these again, keep the rest of the results"
    )
    options = parser.parse_args()
    quick: bool = options.quick
    # A smoke test must not pass for a measurement: it writes elsewhere.
    folder: Path = options.out or (Path("build/bench") if quick else Path(__file__).parent)
    repetitions = options.repetitions or (3 if quick else 9)
    known = sections(
        quick=quick, repetitions=repetitions, block_repetitions=options.block_repetitions or (1 if quick else 3)
    )
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; sections: {', '.join(known)}")
    if options.only and not (folder / "results.json").exists():
        parser.error(f"--only keeps the rest of the results, and there are none in {folder}")
    wanted = {name: known[name] for name in options.only or known}
    results = measure(wanted, str(QUICK if quick else FULL), repetitions)
    if options.only:
        before = json.loads((folder / "results.json").read_text())
        again = {**before.get("again", {}), **dict.fromkeys(wanted, _processor(results["machine"]))}
        results = {**before, **{name: results[name] for name in wanted}, "again": again}
    for table in report.tables(results):
        table.show(console)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "RESULTS.md").write_text(report.page(results))
    console.print(f"written to {folder}")


if __name__ == "__main__":
    main()
