"""Measurements run in processes of their own: threads, allocator and peak memory are properties of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(module: str, *, threads: int, **options: Any) -> Any:
    """Run ``python -m module`` with options as JSON and give back what it answers."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            # Blocks of 64 KiB and more go back to the system when freed, so that resident memory is what lives.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 16) if module.endswith("memory") else "134217728",
        }
        if not module.endswith("memory"):
            environment.pop("MALLOC_MMAP_THRESHOLD_")
        command = [sys.executable, "-m", module, json.dumps({"threads": threads, **options}), str(answer)]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not answer.exists():
            tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
            return {"not_run": f"exit code {done.returncode}: {tail[0]}"[:160]}
        return json.loads(answer.read_text())


def serve(measure: Callable[..., Any]) -> None:
    """The other end of `run`."""
    import torch

    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads"))
    Path(sys.argv[2]).write_text(json.dumps(measure(**options)))
