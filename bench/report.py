"""The report: what it was measured on and with, targets, tables, and the page of all."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench import analysis, assembly, attention, blocks, correctness, costs, sdpa, search, spectra
from bench.tables import Results, Table, Target

PACKAGES = ("curvlens", "torch", "curvlinops-for-pytorch", "PyHessian", "hessian-eigenthings")


def _find(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def facts() -> dict[str, str]:
    """Processor, memory, system."""
    memory = _find("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    return {
        "processor": _find("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory) / 2**20:.0f} GiB" if memory else "unknown",
        "system": platform.system(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "Python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The packages side by side."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def load() -> float:
    """Processes that compete for the cores, averaged over the last minute."""
    return os.getloadavg()[0]


def targets(results: Results) -> list[Target]:
    """All targets, in reading order."""
    return [
        *costs.product_targets(results),
        *blocks.targets(results),
        *search.targets(results),
        *analysis.targets(results),
        *attention.targets(results),
        *assembly.targets(results),
        *costs.profile_targets(results),
        *costs.direction_targets(results),
        *sdpa.targets(results),
    ]


def tables(results: Results) -> list[Table]:
    """All tables, in reading order."""
    head = ["What (cost in gradients)", "Measured", "Target", "Result"]
    return [
        Table("Targets", head, [target.row() for target in targets(results)]),
        costs.product_table(results),
        blocks.vectors_table(results),
        costs.product_memory_table(results),
        correctness.table(results),
        spectra.traces_table(results),
        spectra.eigenvalues_table(results),
        blocks.traces_table(results),
        blocks.table_table(results),
        search.announced_table(results),
        *([search.largest_table(results)] if "search" in results else []),
        *analysis.tables(results),
        attention.dense_table(results),
        attention.norms_table(results),
        assembly.table(results),
        costs.profile_table(results),
        costs.direction_table(results),
        sdpa.time_table(results),
        sdpa.memory_table(results),
        sdpa.model_table(results),
    ]


def page(results: Results) -> str:
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
