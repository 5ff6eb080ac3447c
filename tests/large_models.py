"""SmolLM2 of 135 million parameters under four calculations: announced and real time and memory of each.

``python tests/large_models.py eigs``, from the root of the repository, prints them as JSON; so do ``trace``,
``profile`` and ``analysis``.
Memory is resident memory above the model and a gradient, in a process that gives freed memory back at once; that takes
time, so ``--time`` measures time, in a process that does not.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from bench.measuring import RETURN_FREED, peak_reset, peak_since
from bench.search import timed_products

import curvlens as cl
from curvlens.analysis import Plan
from curvlens.profiling import Forecast
from real import smollm2

ROOT = Path(__file__).parent.parent


class Heard(logging.Handler):
    """What the log of curvlens says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        print(record.getMessage(), file=sys.stderr, flush=True)


def eigs(problem: cl.Problem) -> dict[str, Any]:
    """The largest eigenvalue of H to 1e-2."""
    seconds = timed_products()
    H = cl.hessian(problem)
    H @ torch.zeros(problem.layout.size)  # builds the graph, which is no part of the search
    seconds.clear()
    started = time.perf_counter()
    found = cl.eigs(H, 1, tol=1e-2)
    return {
        "value": float(found.values[0]),
        "residual": float(found.residuals[0]) / found.norm,
        "products": found.products,
        "seconds": time.perf_counter() - started,
        "seconds of products": sum(seconds),
        "announced MiB": found.memory / 2**20,
    }


def trace(problem: cl.Problem) -> dict[str, Any]:
    """tr G by block, 16 samples."""
    started = time.perf_counter()
    found = cl.trace(cl.ggn(problem), 16, by="block")
    shares = sorted(((float(x), name) for name, x in found.items()), reverse=True)
    return {"blocks": len(found), "largest": shares[:3], "seconds": time.perf_counter() - started}


def profile(problem: cl.Problem) -> dict[str, Any]:
    """The profile of 4 samples."""
    forecasts: list[Forecast] = []
    started = time.perf_counter()
    found = cl.profile(problem, samples=4, top=False, announce=forecasts.append)
    return {
        "rows": len(found.table()),
        "adds up": found.adds_up,
        "seconds": time.perf_counter() - started,
        "announced seconds": forecasts[0].seconds,
        "announced MiB": forecasts[0].memory / 2**20,
    }


def analysis(problem: cl.Problem) -> dict[str, Any]:
    """An analysis of half an hour, or of the budget in CURVLENS_BUDGET."""
    budget, plans = os.environ.get("CURVLENS_BUDGET", "30m"), list[Plan]()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        content = cl.analyze(problem, folder, budget, announce=plans.append).content
        page = (Path(folder) / "index.html").stat().st_size
    return {
        "seconds": time.perf_counter() - started,
        "announced seconds": plans[0].seconds,
        "announced MiB": plans[0].memory / 2**20,
        "failed": content["failed"],
        "sections": [name for name in SECTIONS if content.get(name)],
        "sentences": len(content["sentences"]),
        "stages": {each["stage"]: each["seconds"] for each in content["cost"]},
        "page bytes": page,
    }


SECTIONS = ("cells", "spectrum", "eigenvectors", "profile", "descent", "attention")

TASKS = {"eigs": eigs, "trace": trace, "profile": profile, "analysis": analysis}


def measured(task: str) -> dict[str, Any]:
    """Run a task in this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1))))
    warnings.simplefilter("ignore")
    logging.getLogger("curvlens").setLevel(logging.INFO)
    logging.getLogger("curvlens").addHandler(heard := Heard())
    model, batch = smollm2()
    problem = cl.Problem(model, batch, cl.losses.CausalLM())
    started = time.perf_counter()
    problem.gradient()
    gradient = time.perf_counter() - started
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()
    before = peak_reset()
    row = TASKS[task](problem)
    return {**row, "gradient seconds": gradient, "real MiB": peak_since(before), "log": heard.lines}


def in_a_process(task: str, *, freed: bool) -> dict[str, Any]:
    """Run a task in a process of its own."""
    environment = {**os.environ, **(RETURN_FREED if freed else {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, __file__, task], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if "--time" in sys.argv or "--memory" in sys.argv:
        print(json.dumps(in_a_process(sys.argv[1], freed="--memory" in sys.argv), indent=1))
    else:
        print(json.dumps(measured(sys.argv[1])))
