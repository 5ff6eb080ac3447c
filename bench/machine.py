"""What the figures were measured on and with: facts of the machine and versions, without its name."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

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
