"""How everything is measured: in processes of their own, in turns, and by the peak of resident memory.

Threads, allocator and peak memory are properties of a process. A process that measures memory gives freed blocks of
64 KiB and more back to the system (`RETURN_FREED`), so that resident memory is live memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# A process


def run(function: str, *, threads: int, environment: Mapping[str, str] | None = None, **options: Any) -> Any:
    """What a function of this package, as ``attention.norms``, answers to some options in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "bench.measuring", function, json.dumps(options), str(threads), str(answer)]
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"not_run": f"exit code {done.returncode}: {last}"[:160]}
        return json.loads(answer.read_text())


def serve(function: str, options: str, threads: str, answer: str) -> None:
    """The other end of `run`."""
    module, _, name = function.rpartition(".")
    measure = getattr(importlib.import_module(f"bench.{module}"), name)
    torch.set_num_threads(int(threads))
    Path(answer).write_text(json.dumps(measure(**json.loads(options))))


def reason(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return f"{type(error).__name__}: {first}"[:160]


# Time


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turns(
    ways: Mapping[str, Callable[[], object]], repetitions: int, calls: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of each way in each turn, so that noise of the machine hits them alike: the least of some calls."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            times[name].append(min(seconds(way) for _ in range((calls or {}).get(name, 1))))
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median of the ratios of the turns: a phase in which the machine is slow counts once."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "quartiles": [low, high], "values": values}


# Memory


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return int(found[1])


def peak_reset() -> tuple[int, bool]:
    """Kilobytes held now, and whether the peak could be reset to them; otherwise the peak so far."""
    gc.collect()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False
    return _kilobytes("VmRSS"), True


def peak_since(before: tuple[int, bool]) -> float:
    """Megabytes of the peak above what `peak_reset` found."""
    start, reset = before
    return ((_kilobytes("VmHWM") if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - start) / 1024


def peak(call: Callable[[], object]) -> float:
    """Megabytes of the peak while something runs, above what was held before."""
    before = peak_reset()
    call()
    return peak_since(before)


if __name__ == "__main__":
    serve(*sys.argv[1:])
