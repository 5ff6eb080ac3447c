"""How long training follows the quadratic model: forecasts of four rules beside the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.motion.step_edge import fitted, make
from curvlens.papers.signs import LEVEL, larger
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

RULES = {"gd": "gradient descent", "momentum": "momentum 0.9", "nesterov": "Nesterov 0.9", "adam": "Adam"}
STATES = {"learning": (50, 64), "fitted": (300, 32)}
"""Steps of Adam on how many fixed samples, from the initialisation."""
FRACTIONS = (0.1, 0.5)
"""Of the edge of stability: the learning rates."""
HORIZON, QUICK = 100, 10
"""Steps of a forecast."""
AGREEMENT = 0.05
"""As in the forecasts."""
SHOWN = (1, 2, 3, 4, 6, 8, 10, 14, 20, 30, 40, 50, 70, 100)


def points(effort: Effort) -> list[Config]:
    """Networks that still learn, and networks that have fitted their data."""
    steps = QUICK if effort.quick else HORIZON
    return [{"state": state, "steps": steps, "seed": seed} for seed in effort.repeats(2, 8) for state in STATES]


def measure(config: Config) -> Mapping[str, Any]:
    """For each rule and fraction of its edge: when forecast and truth part, and how far apart they are."""
    task, (learned, samples) = Addition(digits=2), STATES[config["state"]]
    model = trained(task, seed=config["seed"], steps=0)
    batch = task.batch(samples, seed=stream(config["seed"], "sequences"))
    problem = cl.Problem(model, [batch], cl.losses.CrossEntropy())
    moments = fitted(problem, learned)
    found: dict[str, Any] = {"loss": problem.loss()}
    for rule in RULES:
        optimizer = make(model, rule, moments if rule == "adam" else None)
        edge = cl.stability(problem, optimizer, tol=1e-3).headroom
        for fraction in FRACTIONS:
            for group in optimizer.param_groups:
                group["lr"] = fraction * edge
            forecast = cl.dynamics.forecast(problem, optimizer, config["steps"])
            found[f"{rule} {fraction:g}"] = {
                "departure": forecast.departure,
                "gap": gaps(forecast.losses, forecast.true_losses),
            }
    return found


def gaps(losses: Tensor, true: Tensor) -> list[float]:
    """The difference of forecast and truth over the largest change of the forecast so far, at some steps."""
    change = (losses - losses[0]).abs().cummax(0).values
    return [float((true[t] - losses[t]).abs() / change[t]) for t in SHOWN if t < len(true)]


def report(records: Sequence[Record]) -> Report:
    """The gap over the steps, and whether the forecasts hold to their end."""
    panels = []
    for state in STATES:
        of = where(records, state=state)
        for fraction in FRACTIONS:
            curves = []
            for colour, (rule, name) in enumerate(RULES.items()):
                lines = [list(map(float, record.result[f"{rule} {fraction:g}"]["gap"])) for record in of]
                length = min(map(len, lines))
                values = torch.tensor([line[:length] for line in lines], dtype=torch.float64)
                middle = values.clamp(1e-12, 1e3).median(0).values.tolist()
                curves.append(Curve(name, list(map(float, SHOWN[:length])), middle, colour=colour))
            title = f"{_named(state)}, {fraction:g} of the edge"
            axes: dict[str, Any] = {"x_label": "step", "x_scale": "log", "y_scale": "log", "y_lines": (AGREEMENT,)}
            panels.append(Panel(curves, title=title, y_label="gap over the change", **axes))
    chart = Chart(
        "forecast-departure",
        "How long training follows the quadratic model",
        "GPTs of two layers that learn to add a few fixed numbers: the difference between the loss of the quadratic "
        "model at w₀ and the true loss under the same rule, over the largest change of the former so far, after full "
        f"steps at fractions of the edge of stability. Medians over the seeds; the line is {AGREEMENT:g}. Adam's "
        "preconditioner is frozen in the forecast alone.",
        panels,
    )
    return Report((chart,), (_follows(records),))


def _named(state: str) -> str:
    return {"learning": "while it learns", "fitted": "data fitted"}[state]


def _follows(records: Sequence[Record]) -> Finding:
    steps = records[0].config["steps"]
    parts: dict[str, bool | None] = {}
    texts = []
    for state in STATES:
        of = where(records, state=state)
        for rule, name in RULES.items():
            known, agree = [], []
            for fraction in FRACTIONS:
                found = [record.result[f"{rule} {fraction:g}"]["departure"] for record in of]
                left = [steps + 1.0 if each is None else float(each) for each in found]
                known.append(float(torch.tensor(left).median()))
                agree.append(larger(left, [steps + 0.5] * len(left)))
            parts[f"{name}, {_named(state)}"] = all_of(agree)
            said = " and ".join("never" if each > steps else f"{each:g}" for each in known)
            texts.append(f"{name}, {_named(state)}: {said}")
    shares = " and ".join(f"{fraction:g}" for fraction in FRACTIONS)
    return judged_parts(
        "quadratic-course",
        f"The step from which forecast and true loss differ by more than {AGREEMENT:.0%} of the change, median over "
        f"the seeds, at {shares} of the edge of stability: {'; '.join(texts)}. It is to be never in {steps} steps, at "
        f"both; sign test at {LEVEL:.0%}.",
        parts,
    )


FORECAST_DEPARTURE = Experiment(
    "forecast-departure",
    "How long training follows the quadratic model",
    f"{ARTICLE}, Section 8.2",
    points,
    measure,
    report,
)
