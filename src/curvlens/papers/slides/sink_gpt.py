"""Attention sinks in trained GPTs: what a bias towards the first token does to the spectrum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.losses import CrossEntropy
from curvlens.operators import hessian
from curvlens.papers.comparisons import ratio, undecided
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.sizes import marked
from curvlens.papers.sources import SLIDES
from curvlens.papers.sweeps import Sweep, sweep
from curvlens.papers.verdicts import Finding, judged
from curvlens.problem import Problem
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record


def points(effort: Effort) -> list[Config]:
    """GPTs that were trained with a sink in every layer."""
    return [
        {"sink": sink, "steps": 100 if effort.quick else 400, "seed": seed}
        for seed in effort.repeats(2, 5)
        for sink in (0.0, 2.0, 4.0, 6.0)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Eigenvalues of the whole Hessian, dense."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=config["steps"], sink=config["sink"])
    problem = Problem(model, [task.batch(16, seed=0)], CrossEntropy())
    values = torch.linalg.eigvalsh(hessian(problem).dense())
    return {
        "top": float(values[-1]),
        "bottom": float(-values[0]),
        "middle": float(values.abs().quantile(0.5)),
        "norm": float(values.norm()),
        "loss": float(problem.loss()),
    }


def report(records: Sequence[Record]) -> Report:
    """Whether the spectrum is stretched."""
    names = {"top": r"$\lambda_{\max}$", "bottom": r"$-\lambda_{\min}$", "middle": r"median of $|\lambda|$"}
    lines = {name: sweep(records, "sink", name) for name in names}
    losses = [record.result["loss"] for record in records]
    chart = Chart(
        "sink-gpt",
        "Attention sinks in a trained GPT",
        "GPTs of two layers that were trained to add, with a bias towards the first token in every layer: geometric "
        f"mean over the seeds with its 95 % interval. Their loss is {min(losses):.2f} to {max(losses):.2f} a token; "
        f"guessing has {math.log(Addition().vocab):.2f}.",
        [
            Panel(
                [line.curve(names[name], colour=i) for i, (name, line) in enumerate(lines.items())],
                (),
                "",
                "bias towards the first token",
                "eigenvalues of the Hessian",
                y_scale="log",
            )
        ],
        columns=1,
    )
    return Report((chart,), (_stretched(lines["top"], lines["middle"]),), notes=marked(records, "sink", "biases"))


def _stretched(top: Sweep, middle: Sweep) -> Finding:
    """λ_max over the median of |λ|, with each sink over without, in pairs of one seed."""
    stretch = top.values / middle.values
    found = {sink: ratio(stretch[:, i], stretch[:, 0]) for i, sink in enumerate(top.x) if i}
    tops = {sink: ratio(top.values[:, i], top.values[:, 0]) for i, sink in enumerate(top.x) if i}
    bias = torch.tensor(top.x, dtype=torch.float64)
    centred = bias - bias.mean()
    trend = (stretch.log() @ centred / centred.square().sum()).exp()  # of each model, by least squares
    rise = ratio(trend, torch.ones_like(trend))
    return judged(
        "sink-gpt",
        "λ_max over the median of |λ| is multiplied, for each unit of bias, by "
        f"{rise}: a line through the logarithms at all biases, geometric mean over the trained models with its 95 % "
        "interval; one number for all biases, since each bias alone could stand out by chance. With a sink "
        f"over without: {'; '.join(f'bias {sink:g}: {each}' for sink, each in found.items())}. λ_max alone: "
        f"{'; '.join(f'bias {sink:g}: {each}' for sink, each in tops.items())}." + undecided(rise.above(), len(trend)),
        holds=rise.above(),
    )


SINK_GPT = Experiment("sink-gpt", "Sinks in a trained GPT", SLIDES, points, measure, report)
