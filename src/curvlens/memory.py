"""Sizes of memory: parsed from texts, printed, and free on the machine."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import torch

from curvlens.errors import CurvlensError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

UNKNOWN = 4 << 30
"""Bytes assumed to be free if the system does not tell."""


def parse_bytes(size: int | float | str) -> int:
    """A number of bytes, or a text like ``"4GiB"``.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0:
        return int(min(size, sys.maxsize))
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", str(size).lower())
    if not match or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise CurvlensError(
            f"memory={size!r} is not a size. Give a number of bytes, or a text: memory='4GiB', memory='500MB'."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device. Call `give_back` first to include what the C library keeps."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    free = int(found[1]) * 1024 if found else _installed_bytes()
    return min(free, *cgroup_rooms(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup"))), sys.maxsize)


def _installed_bytes() -> int:
    """On macOS all memory of the machine; on Windows the free memory; else `UNKNOWN`."""
    if sys.platform == "win32":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: the first entry is its length, the third the free memory
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return int(status[2])
        return UNKNOWN
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such call, or no such name
        return UNKNOWN


def give_back() -> None:
    """Return freed memory, which the C library keeps for later, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def cgroup_rooms(root: Path, membership: str) -> list[int]:
    """The bytes that each limit of a container or a batch system leaves to this process.

    ``membership`` is the text of ``/proc/self/cgroup``. Limits of all parent groups count. Inside a container these
    paths may be those of the host; its own group is then the root.
    """
    rooms = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, limit, used, cached = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        elif not controllers:
            base, limit, used, cached = root, "memory.max", "memory.current", ""
        else:
            continue
        inside = Path(path.lstrip("/"))
        for folder in {base, *(base / group for group in (inside, *inside.parents))}:
            bound, usage = _text(folder / limit).strip(), _text(folder / used).strip()
            if bound.isdigit() and usage.isdigit():
                # The system frees cached file pages as soon as memory is needed.
                files = re.search(rf"^{cached}inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                rooms.append(max(int(bound) - int(usage) + (int(files[1]) if files else 0), 0))
    return rooms


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def readable(size: float) -> str:
    """A size for people: ``'1.5 GiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
