"""Commands that are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import curvlens as cl

# A process of its own measures with the package that is tested, wherever that was found.
PATHS = os.pathsep.join(
    map(str, (Path(__file__).parents[1], Path(__file__).parents[0], Path(cl.__file__).parent.parent))
)
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def killed_when(command: Sequence[str], file: Path, lines: int) -> None:
    """Start a command, and kill it and all its processes when a file has so many lines."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=ONE_THREAD
    )
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= lines):
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
