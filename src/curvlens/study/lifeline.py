"""A worker process ends with the process that started it, however that one ended."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from functools import cache

LOOK = 0.5
"""Seconds between two looks; a unit takes from milliseconds to minutes, and no signal is sent for ``kill -9``."""


def end_with(parent: int) -> None:
    """End this process, if it is a child of ``parent``, as soon as that one is gone."""
    if os.getpid() != parent:
        _watch(parent)


@cache  # one watcher a process
def _watch(parent: int) -> None:
    def look() -> None:
        _wait(parent)
        os._exit(1)  # at once: nobody is there to be told, and results on disk are the parent's

    threading.Thread(target=look, name="curvlens-lifeline", daemon=True).start()


def _wait(parent: int) -> None:
    """Return when the parent is gone."""
    if sys.platform == "win32":  # where an orphan keeps the number of its parent
        synchronize, for_ever = 0x0010_0000, 0xFFFF_FFFF
        handle = ctypes.windll.kernel32.OpenProcess(synchronize, False, parent)
        if handle:
            ctypes.windll.kernel32.WaitForSingleObject(handle, for_ever)
        return
    # an orphan is given another parent; the number of the old one may belong to anybody by then
    while os.getppid() == parent:
        time.sleep(LOOK)
