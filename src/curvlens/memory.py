"""Memory, as users say it and as the machine has it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from curvlens.errors import CurvlensError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(size: int | float | str) -> int:
    """A number of bytes, or a text like ``"4GiB"``.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(min(size, sys.maxsize))
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", str(size).lower())
    if not match or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise CurvlensError(f"memory={size!r} is no size. Give bytes, or a text like '4GiB' or '500MB'.")
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes(device: torch.device) -> int:
    """What can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def readable(size: float) -> str:
    """A size for people: ``'1.5 GiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
