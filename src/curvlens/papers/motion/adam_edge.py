"""Training at the edge of stability: the sharpness of Adam and of gradient descent on full batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.comparisons import between, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.learners import trained
from curvlens.papers.sources import ADAM_EDGE, GD_EDGE
from curvlens.papers.sweeps import Sweep, mean, where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

NAMES = {"adam": "Adam", "gd": "gradient descent"}
RUNS = (("adam", 6e-4, 800), ("adam", 3e-4, 1400), ("gd", 0.02, 1000), ("gd", 0.01, 1200))
"""Rule, learning rate, steps: so few that the loss is not near 0, where the sharpness of a cross-entropy falls."""
QUICK = (("adam", 6e-4, 300), ("gd", 0.02, 300))
SAMPLES = 128
MEASUREMENTS = (50, 20)
"""Of one run, at equal distances, and quick."""
ABOUT = 1.5
"""The factor within which a sharpness is about the edge."""
TOLERANCE = 0.02
"""Of an eigenvalue, relative to the edge's."""


def points(effort: Effort) -> list[Config]:
    """GPTs that learn to add on fixed samples, from their initialisation."""
    runs, measured = (QUICK, MEASUREMENTS[1]) if effort.quick else (RUNS, MEASUREMENTS[0])
    return [
        {"rule": rule, "lr": lr, "steps": steps, "every": steps // measured, "seed": seed}
        for seed in effort.repeats(2, 6)
        for rule, lr, steps in runs
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The largest eigenvalue as a fraction of the optimiser's edge while it trains, and the loss."""
    task, seed, count = Addition(digits=2), config["seed"], config["steps"]
    model = trained(task, seed=seed, steps=0)
    x, y = task.batch(SAMPLES, seed=stream(seed, "sequences"))
    problem = cl.Problem(model, [(x, y)], cl.losses.CrossEntropy())
    make = torch.optim.Adam if config["rule"] == "adam" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=config["lr"])
    found = None
    result: dict[str, Any] = {"steps": [], "ratio": [], "loss": []}
    for step in range(1, count + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % config["every"] == 0:
            found = cl.stability(problem, optimizer, tol=TOLERANCE, start=found)
            result["steps"].append(step)
            result["ratio"].append(found.ratio)
            result["loss"].append(problem.loss())
    return result


def report(records: Sequence[Record]) -> Report:
    """The fraction of the edge over the steps, and where it is at the end."""
    panels = []
    for rule, name in NAMES.items():
        of = where(records, rule=rule)
        rates = sorted({record.config["lr"] for record in of}, reverse=True)
        curves = [_over(where(of, lr=lr)).curve(f"η = {lr:g}", colour=i, marker=False) for i, lr in enumerate(rates)]
        edge = r"$\lambda_{\max}(P^{-1/2}HP^{-1/2})\,\eta/38$" if rule == "adam" else r"$\lambda_{\max}(H)\,\eta/2$"
        panels.append(Panel(curves, title=name, x_label="step", y_label=edge, y_scale="log", y_lines=(1.0,)))
    chart = Chart(
        "adam-edge",
        "Training at the edge of stability",
        f"A GPT of two layers learns to add on {SAMPLES} fixed samples, all of them in each step, from its "
        "initialisation. The sharpness of Adam's preconditioned Hessian, over 2(1+β₁)/((1−β₁)η) = 38/η, and that of "
        "the Hessian for gradient descent, over 2/η: 1 is the edge. Geometric means and ranges over the seeds.",
        panels,
    )
    return Report((chart,), tuple(_hovers(where(records, rule=rule), rule) for rule in NAMES))


def _over(records: Sequence[Record]) -> Sweep:
    """The fraction of the edge over the steps, by seed."""
    values = torch.tensor([list(map(float, record.result["ratio"])) for record in records], dtype=torch.float64)
    return Sweep(tuple(map(float, records[0].result["steps"])), values.clamp(min=1e-6))


def _hovers(records: Sequence[Record], rule: str) -> Finding:
    """Whether the geometric mean is about 1 in both halves of the last third: it neither passes 1 nor falls again."""
    parts: dict[str, bool | None] = {}
    texts = []
    for lr in sorted({record.config["lr"] for record in records}, reverse=True):
        values = _over(where(records, lr=lr)).values
        sixth = values.shape[1] // 6
        late = values[:, -2 * sixth :]
        halves = [_mean(late[:, :sixth]), _mean(late[:, sixth:])]
        parts[f"η = {lr:g}"] = all_of(between(half, -math.log(ABOUT), math.log(ABOUT)) for half in halves)
        begun, whole = _geometric(values[:, :1]), _geometric(late)
        texts.append(f"η = {lr:g} {whole} (from {begun} at the first measurement)")
    edge = "38/η" if rule == "adam" else "2/η"
    return judged_parts(
        f"{rule}-edge",
        f"The sharpness over {edge} in the last third of the training: {'; '.join(texts)}. Geometric means over steps "
        "and seeds with their 95 % intervals over the seeds. It hovers about the edge if the mean is within a factor "
        f"of {ABOUT:g} of it in both halves of that third.",
        parts,
    )


def _mean(values: Tensor) -> Number:
    """Of the logarithms, by seed."""
    return mean("", values.log().mean(1).tolist())


def _geometric(values: Tensor) -> str:
    found = ratio(values.log().mean(1).exp(), torch.ones(len(values), dtype=torch.float64))
    return f"{found.value:.2g} ({found.low:.2g} to {found.high:.2g})"


ADAM_EDGE_EXPERIMENT = Experiment(
    "adam-edge",
    "Adam and gradient descent at the edge of stability",
    f"{ADAM_EDGE} and {GD_EDGE}",
    points,
    measure,
    report,
)
