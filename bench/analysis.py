"""`curvlens.analyze`: its announced against its real time and memory, whether it keeps a budget, and how errors fall.

The parent of each measurement gives it a process of its own. Folders are temporary.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import curvlens as cl
from bench.measuring import peak_reset, peak_since
from bench.model import MIDDLE, QUICK, Sizes, model_and_batch
from bench.tables import Results, Table, Target, absent
from curvlens.analysis import Plan
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig

WIDE = Sizes(n_layer=2, d_model=256, n_head=8, context=64, batch=2, vocab=4000)
"""4 million parameters, most of them in two large tables."""
MODELS = ("4 layers", "wide", "trained")
GRADIENTS = {"4 layers": 400, "wide": 200, "trained": 600}
TIMES = ("30s", "60s")
COURSE = ("1m", "3m", "10m")
QUICK_TIMES, QUICK_COURSE = ("10s",), ("8s", "12s")
LEAST = 0.01
"""Errors are relative to max(|cell|, this part of the largest cell), as in the schedule of an analysis."""
TIME_TARGET, MEMORY_TARGET, BUDGET_TARGET = 0.3, 0.25, 1.1


def problem(name: str, *, quick: bool) -> cl.Problem:
    """The problems, by name."""
    if name == "trained":
        return _trained(steps=20 if quick else 200)
    sizes = QUICK if quick else MIDDLE if name == "4 layers" else WIDE
    return cl.Problem(*model_and_batch(sizes), cl.losses.CrossEntropy())


def _trained(steps: int) -> cl.Problem:
    """A GPT of two layers that learned to add for some seconds."""
    torch.manual_seed(0)
    task = Addition()
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, n_layer=2, n_head=4, d_model=64))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, labels = task.batch(64, seed=step + 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return cl.Problem(model.eval(), task.batch(64, seed=0), cl.losses.CausalLM(shift=False))


# What is measured


def planned(*, quick: bool, name: str) -> dict[str, Any]:
    """Announced and real seconds and memory of a budget of gradients."""
    warnings.simplefilter("ignore")
    asked, plans = problem(name, quick=quick), list[Plan]()
    asked.gradient()
    before = peak_reset()
    if not before[1]:
        return {"not_run": "the peak of memory cannot be reset on this system"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = cl.analyze(asked, folder, f"{100 if quick else GRADIENTS[name]} gradients", announce=plans.append)
        real = time.perf_counter() - started
    return {
        "parameters": asked.layout.size,
        "gradients": plans[0].gradients,
        "planned": plans[0].seconds,
        "real": real,
        "planned memory": plans[0].memory / 2**20,
        "real memory": peak_since(before),
        "failed": [each["kind"] for each in found.content["failed"]],
    }


def timed(*, quick: bool, budget: str) -> dict[str, Any]:
    """Wall time of a budget in time, on the model of four layers, in a new folder."""
    warnings.simplefilter("ignore")
    asked = problem("4 layers", quick=quick)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cl.analyze(asked, folder, budget)
    return {"budget": _seconds(budget), "real": time.perf_counter() - started}


def course(*, quick: bool) -> list[dict[str, Any]]:
    """The largest relative errors of one folder that is refined with larger and larger budgets."""
    warnings.simplefilter("ignore")
    asked, rows = problem("trained", quick=quick), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for budget in QUICK_COURSE if quick else COURSE:
            content = cl.analyze(asked, Path(folder), budget).content
            rows.append({"budget": budget, **{letter: errors(content, letter) for letter in ("G", "H")}})
    return rows


def errors(content: dict[str, Any], letter: str) -> dict[str, Any]:
    """The largest and the median error of the traces of an operator, relative to max(|cell|, 1 % of the largest)."""
    cells = content["cells"].get(letter, {}).get("trace", {})
    largest = max((abs(cell["value"]) for cell in cells.values()), default=0.0)
    sizes = [max(abs(cell["value"]), LEAST * largest) for cell in cells.values()]
    found = sorted((c["stderr"] or 0.0) / size if size else 0.0 for c, size in zip(cells.values(), sizes, strict=True))
    return {
        "largest": found[-1] if found else None,
        "median": found[len(found) // 2] if found else None,
        "measured": len(found),
        "all": len(content["blocks"]),
    }


def _seconds(budget: str) -> float:
    return cl.study.parse_budget(budget).seconds or math.nan  # type: ignore[union-attr]


# In the report


def targets(results: Results) -> list[Target]:
    """Announced against real, and budgets in time; nothing where the section was not measured."""
    if "analysis" not in results:
        return []
    found = results["analysis"]
    memory, budgets = found["memory"], found["budgets"]
    return [
        Target("announced against real time of an analysis, relative", _off(found["time"], "real", "planned"),
               TIME_TARGET, True),
        Target("announced against real memory of an analysis, relative",
               _off(memory, "real memory", "planned memory"), MEMORY_TARGET, True),
        Target("time of an analysis over its budget", None if _missing(budgets) else
               max(row["real"] / row["budget"] for row in budgets.values()), BUDGET_TARGET, True),
    ]  # fmt: skip


def _off(rows: Results, real: str, announced: str) -> float | None:
    """The largest |real / announced − 1|."""
    return None if _missing(rows) else max(abs(row[real] / row[announced] - 1) for row in rows.values())


def _missing(rows: Results) -> bool:
    return any("not_run" in row for row in rows.values())


def tables(results: Results) -> list[Table]:
    """Plans, budgets, and the course of the errors."""
    if "analysis" not in results:
        return []
    found = results["analysis"]
    return [_planned_table(found), _budget_table(found), _course_table(found["course"])]


def _planned_table(found: Results) -> Table:
    rows = []
    for name, timed_row in found["time"].items():
        held = found["memory"][name]
        if "not_run" in timed_row or "not_run" in held:
            rows.append([name, *absent(timed_row if "not_run" in timed_row else held, 7)])
            continue
        off, more = timed_row["real"] / timed_row["planned"] - 1, held["real memory"] / held["planned memory"] - 1
        cells = [f"{timed_row['parameters']:,}", f"{timed_row['planned']:.1f}", f"{timed_row['real']:.1f}"]
        memory = [f"{held['planned memory']:.0f}", f"{held['real memory']:.0f}", f"{more:+.0%}"]
        rows.append([name, *cells, f"{off:+.0%}", *memory])
    budgets = ", ".join(f"{gradients} ({name})" for name, gradients in GRADIENTS.items())
    notes = [
        f"`analyze` with a budget in gradients: {budgets}. Seconds include the page and its figures. Memory in MiB is "
        "the peak of resident memory above that of the process with its problem and a gradient, in a run of its own."
    ]
    head = ["Model", "parameters", "announced s", "real s", "difference", "announced MiB", "real MiB", "difference"]
    return Table("Announced and real cost of an analysis", head, rows, notes)


def _budget_table(found: Results) -> Table:
    rows = []
    for budget, row in found["budgets"].items():
        known = "not_run" not in row
        cells = [f"{row['real']:.1f}", f"{row['real'] / row['budget']:.0%}"] if known else absent(row, 2)
        rows.append([budget, *cells])
    notes = ["The model of four layers, in a new folder each; the page is within the budget."]
    return Table("Budgets in time", ["Budget", "real s", "of the budget"], rows, notes)


def _course_table(rows: Any) -> Table:
    head = ["Budget", *(f"{what} of {letter}" for letter in "GH" for what in ("largest", "median", "measured"))]
    if "not_run" in rows:
        return Table("Errors of the heat map", head, [["all", *absent(rows, 6)]])
    body = []
    for row in rows:
        cells: list[str] = []
        for letter in "GH":
            each = row[letter]
            cells += ["–" if each[what] is None else f"{each[what]:.1%}" for what in ("largest", "median")]
            cells.append(f"{each['measured']} of {each['all']}")
        body.append([row["budget"], *cells])
    notes = [
        "Standard errors of traces of blocks over max(|cell|, 1 % of the largest cell), of the trained model. "
        "One folder is refined from budget to budget, as a user does; blocks that were not measured are counted apart."
    ]
    return Table("Errors of the heat map", head, body, notes)
