"""``python -m bench``: measure, print, and write RESULTS.md and results.json."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine
from bench.announced import BUDGETS
from bench.child import run
from bench.memory import RETURN_FREED
from bench.methods import METHODS
from bench.model import FULL, QUICK
from bench.report import tables
from bench.timing import GRADIENT

console = Console()


def measure(*, quick: bool, repetitions: int, block_repetitions: int) -> dict[str, Any]:
    """Everything, one process after the other: two at a time would disturb each other."""
    cores = min(2, os.cpu_count() or 1)
    started, load = time.time(), machine.load()
    timing, memory = {}, {}
    for threads in range(1, cores + 1):
        console.print(f"cost, {threads} thread(s) …")
        timing[str(threads)] = run("bench.timing", threads=threads, quick=quick, repetitions=repetitions)
    console.print("blocks …")
    blocks = run("bench.blocks", threads=cores, quick=quick, repetitions=block_repetitions)
    console.print("memory …")
    for key in [GRADIENT, *(method.key for method in METHODS if method.timed)]:
        memory[key] = run("bench.memory", threads=cores, quick=quick, key=key, environment=RETURN_FREED)
    console.print("correctness …")
    correctness = run("bench.correctness", threads=1)
    counts = {}
    for name in ("traces", "eigenvalues"):
        console.print(f"{name} …")
        counts[name] = run(f"bench.{name}", threads=1, quick=quick)
    console.print("traces of all blocks …")
    block_traces = run("bench.block_traces", threads=cores, quick=quick)
    console.print("block table …")
    block_table = run("bench.block_table", threads=cores, quick=quick)
    console.print("announced memory …")
    announced = {
        budget: run("bench.announced", threads=cores, quick=quick, budget=budget, environment=RETURN_FREED)
        for budget in BUDGETS
    }
    return {
        "model": str(QUICK if quick else FULL),
        "repetitions": repetitions,
        "machine": machine.facts(),
        "versions": machine.versions(),
        "load": load,
        "minutes": (time.time() - started) / 60,
        "timing": timing,
        "blocks": {str(cores): blocks},
        "memory": memory,
        "correctness": correctness,
        **counts,
        "block_traces": block_traces,
        "block_table": block_table,
        "announced": announced,
    }


def page(results: dict[str, Any]) -> str:
    """RESULTS.md."""
    head = [
        "# Benchmark",
        f"{results['model']}, float32, random tokens. Written by `make bench`, which measures everything anew in one "
        f"run ({results['minutes']:.0f} minutes); `python -m bench --quick` is a smoke test with a tiny model.",
        "\n".join(f"- {name}: {value}" for name, value in {**results["machine"], **results["versions"]}.items()),
        f"Other load on the machine when it started: {results['load']:.1f} processes.",
    ]
    return "\n\n".join([*head, *(table.markdown() for table in tables(results))]) + "\n"


def main() -> None:
    """Parse, measure, show, write."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few repetitions, to see that it runs")
    parser.add_argument("--repetitions", type=int, help="of each product (9; quick: 3)")
    parser.add_argument("--block-repetitions", type=int, help="of the blocks (3; quick: 1)")
    parser.add_argument("--out", type=Path, help="folder of RESULTS.md and results.json (bench; quick: build/bench)")
    options = parser.parse_args()
    quick: bool = options.quick
    results = measure(
        quick=quick,
        repetitions=options.repetitions or (3 if quick else 9),
        block_repetitions=options.block_repetitions or (1 if quick else 3),
    )
    for table in tables(results):
        table.show(console)
    # A smoke test must not pass for a measurement: it writes elsewhere.
    folder: Path = options.out or (Path("build/bench") if quick else Path(__file__).parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "RESULTS.md").write_text(page(results))
    console.print(f"written to {folder}")


if __name__ == "__main__":
    main()
