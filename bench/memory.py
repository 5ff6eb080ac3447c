"""Peak memory of one row, in a process of its own.

Counted is resident memory: the highest point while the row is built and multiplies twice, less what the process held
before, with model, vector, one gradient and the libraries loaded. The allocator is told to give freed blocks of 64 KiB
and more back to the system (`RETURN_FREED`), so that resident memory is live memory.
"""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import torch

from bench.child import serve
from bench.methods import BY_KEY, Product, reason
from bench.model import FULL, QUICK, SMALL, gradient, make_batch, make_model
from bench.timing import GRADIENT

RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return int(found[1])


def peak_reset() -> tuple[int, bool]:
    """Kilobytes held now, and whether the peak could be reset to them; otherwise the peak so far."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False
    return _kilobytes("VmRSS"), True


def peak_since(before: tuple[int, bool]) -> float:
    """Megabytes of the peak above what `peak_reset` found."""
    start, reset = before
    return ((_kilobytes("VmHWM") if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - start) / 1024


def measure(*, quick: bool, key: str) -> dict[str, Any]:
    """Megabytes above the baseline, and whether the peak could be reset to it (otherwise the growth of the maximum)."""
    sizes = QUICK if quick else FULL
    model, batch = make_model(sizes), make_batch(sizes)
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    gradient(model, batch)
    if key != GRADIENT:
        try:  # the libraries' own imports are no cost of a product
            small, tokens = make_model(SMALL), make_batch(SMALL)
            BY_KEY[key].build(small, [tokens])(torch.zeros(sum(p.numel() for p in small.parameters())))
        except Exception as error:
            return {"not_run": reason(error)}
    gc.collect()
    before = peak_reset()
    try:
        product: Product = (
            (lambda _: torch.cat([g.flatten() for g in gradient(model, batch)]))
            if key == GRADIENT
            else (BY_KEY[key].build(model, [batch]))
        )
        product(v)
        product(v)
    except Exception as error:
        return {"not_run": reason(error)}
    return {"megabytes": peak_since(before), "reset": before[1]}


if __name__ == "__main__":
    serve(measure)
