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

from bench import machine
from bench.announced import BUDGETS
from bench.attention import LENGTHS
from bench.child import run
from bench.memory import RETURN_FREED
from bench.methods import METHODS
from bench.model import FULL, QUICK
from bench.report import tables
from bench.sdpa import LENGTHS as SDPA_LENGTHS
from bench.sdpa_memory import ROWS as SDPA_ROWS
from bench.timing import GRADIENT

console = Console()


def sections(*, quick: bool, repetitions: int, block_repetitions: int) -> dict[str, Callable[[], Any]]:
    """What is measured, by the name under which it is kept."""
    cores = min(2, os.cpu_count() or 1)

    def child(module: str, threads: int = cores, **options: Any) -> Any:
        return run(f"bench.{module}", threads=threads, quick=quick, **options)

    rows = [GRADIENT, *(method.key for method in METHODS if method.timed)]
    return {
        "timing": lambda: {str(n): child("timing", n, repetitions=repetitions) for n in range(1, cores + 1)},
        "blocks": lambda: {str(cores): child("blocks", repetitions=block_repetitions)},
        "memory": lambda: {key: child("memory", key=key, environment=RETURN_FREED) for key in rows},
        "correctness": lambda: run("bench.correctness", threads=1),
        "traces": lambda: child("traces", 1),
        "eigenvalues": lambda: child("eigenvalues", 1),
        "block_traces": lambda: child("block_traces"),
        "block_table": lambda: child("block_table"),
        "attention": lambda: {str(n): child("attention", 1, length=n) for n in LENGTHS[: 1 if quick else None]},
        "attention_norms": lambda: child("attention_norms"),
        "attention_memory": lambda: child("attention_memory", 1, environment=RETURN_FREED),
        "assembly": lambda: child("assembly", 1),
        "attribution": lambda: child("attribution"),
        "attribution_memory": lambda: {
            key: child("attribution_memory", key=key, environment=RETURN_FREED) for key in ("product", "profile")
        },
        "sdpa": lambda: {
            str(n): {
                str(length): child("sdpa", n, length=length) for length in list(SDPA_LENGTHS)[: 3 if quick else None]
            }
            for n in range(1, cores + 1)
        },
        "sdpa_memory": lambda: {key: child("sdpa_memory", 1, key=key, environment=RETURN_FREED) for key in SDPA_ROWS},
        "long_context": lambda: {
            way: child("long_context", way=way, environment=RETURN_FREED) for way in ("tiles", "math")
        },
        "announced": lambda: {b: child("announced", budget=b, environment=RETURN_FREED) for b in BUDGETS},
        "search": lambda: {"time": child("search"), "memory": child("search", environment=RETURN_FREED)},
    }


def measure(wanted: dict[str, Callable[[], Any]], model: str, repetitions: int) -> dict[str, Any]:
    """One process after the other: two at a time would disturb each other."""
    started = time.time()
    results: dict[str, Any] = {
        "model": model,
        "repetitions": repetitions,
        "machine": machine.facts(),
        "versions": machine.versions(),
        "load": machine.load(),
    }
    for name, section in wanted.items():
        console.print(f"{name} …")
        results[name] = section()
    return {**results, "minutes": (time.time() - started) / 60}


def _processor(machine: dict[str, Any]) -> str:
    return f"{machine['processor']} ({machine['vector instructions']})"


def page(results: dict[str, Any]) -> str:
    """RESULTS.md."""
    head = [
        "# Benchmark",
        f"{results['model']}, float32, random tokens. Written by `make bench`, which measures everything anew in one "
        f"run ({results['minutes']:.0f} minutes); `python -m bench --quick` is a smoke test with a tiny model.",
        "\n".join(f"- {name}: {value}" for name, value in {**results["machine"], **results["versions"]}.items()),
        f"Other load on the machine when it started: {results['load']:.1f} processes.",
    ]
    for processor in sorted(set(results.get("again", {}).values())):
        sections = ", ".join(name for name, other in sorted(results["again"].items()) if other == processor)
        head.append(f"Measured again later, in a run of their own, on {processor}: {sections}.")
    return "\n\n".join([*head, *(table.markdown() for table in tables(results))]) + "\n"


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
    for table in tables(results):
        table.show(console)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "RESULTS.md").write_text(page(results))
    console.print(f"written to {folder}")


if __name__ == "__main__":
    main()
