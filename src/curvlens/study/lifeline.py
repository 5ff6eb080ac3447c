"""Ends a worker process when the process that started it has ended, in any way."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from functools import cache

LOOK = 0.5
"""Seconds between two checks. A unit takes from milliseconds to minutes, and ``kill -9`` sends no signal."""


def end_with(parent: int) -> None:
    """End this process, if it is a child of ``parent``, as soon as the parent has ended."""
    if os.getpid() != parent:
        _watch(parent)


@cache  # one watcher for each process
def _watch(parent: int) -> None:
    def look() -> None:
        _wait(parent)
        os._exit(1)  # immediately: nobody waits for this process, and only the parent writes results

    threading.Thread(target=look, name="curvlens-lifeline", daemon=True).start()


def _wait(parent: int) -> None:
    """Return when the parent has ended."""
    if sys.platform == "win32":  # here an orphan keeps the process id of its parent
        synchronize, for_ever = 0x0010_0000, 0xFFFF_FFFF
        handle = ctypes.windll.kernel32.OpenProcess(synchronize, False, parent)
        if handle:
            ctypes.windll.kernel32.WaitForSingleObject(handle, for_ever)
        return
    # an orphan gets another parent; the old id may belong to another process by then
    while os.getppid() == parent:
        time.sleep(LOOK)
