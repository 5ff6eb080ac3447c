"""Measurements run in processes of their own: threads, allocator and peak memory are properties of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def run(module: str, *, threads: int, environment: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Run ``python -m module`` with options as JSON and give back what it answers."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, json.dumps({"threads": threads, **options}), str(answer)]
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"not_run": f"exit code {done.returncode}: {last}"[:160]}
        return json.loads(answer.read_text())


def serve(measure: Callable[..., Any]) -> None:
    """The other end of `run`."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads"))
    Path(sys.argv[2]).write_text(json.dumps(measure(**options)))
