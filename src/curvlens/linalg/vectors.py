"""Scalars of long vectors: in float64, slice by slice, so that no whole vector is copied to float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

LONG = 1 << 22
"""Beyond this length, passes over a vector take noticeable time beside products."""
CACHED = 1 << 19
"""Entries at a time on a CPU: 4 MiB in float64, which stays in the cache between the cast and the sum."""
STREAMED = 1 << 21
"""The same if nothing is cast and slices are only for accuracy: 8 MiB in float32."""
LAUNCHED = 1 << 22
"""The same on other devices, where a slice costs kernel launches: 32 MiB."""


def slices(n: int, rows: int, device: torch.device, entries: int = CACHED) -> Iterator[slice]:
    """Cut n columns so that ``rows`` rows of a slice are one portion of work: ``entries`` numbers on a CPU."""
    width = max((entries if device.type == "cpu" else LAUNCHED) // max(rows, 1), 1024)
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def dot(u: Tensor, v: Tensor) -> float:
    """⟨u, v⟩."""
    total = torch.zeros((), dtype=torch.float64, device=u.device)
    for part in slices(len(u), 2, u.device):
        total += u[part].double() @ v[part].double()
    return float(total)


def norm(u: Tensor) -> float:
    """‖u‖."""
    return math.sqrt(dot(u, u))


def distance(u: Tensor, c: float, v: Tensor) -> float:
    """‖u − c v‖."""
    total = torch.zeros((), dtype=torch.float64, device=u.device)
    for part in slices(len(u), 3, u.device):
        rest = torch.sub(u[part].double(), v[part].double(), alpha=c)
        total += rest @ rest
    return math.sqrt(float(total))
