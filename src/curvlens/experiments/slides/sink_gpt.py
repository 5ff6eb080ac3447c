"""Attention sinks in trained GPTs: what a bias towards the first token does to the spectrum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.learners import trained
from curvlens.experiments.sources import SLIDES
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import sweep
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel
from curvlens.losses import CrossEntropy
from curvlens.operators import hessian
from curvlens.problem import Problem


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
    chart = Chart(
        "sink-gpt",
        "Attention sinks in a trained GPT",
        "GPTs of two layers that learnt to add with a bias towards the first token in every layer: geometric mean "
        "over the seeds with its 95 % interval.",
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
    ratio = lines["top"].values / lines["middle"].values
    ends = ratio.log().mean(0).exp()
    tops = lines["top"].middle()
    rises = [bool((row[-1] > row[0]).item()) for row in ratio]
    finding = Finding(
        "sink-gpt",
        "holds" if all(rises) else "holds when" if float(ends[-1]) > float(ends[0]) else "does not hold",
        f"λ_max goes from {float(tops[0]):.3g} without a sink to {float(tops[-1]):.3g} with a bias of "
        f"{lines['top'].x[-1]:g}, λ_max over the median of |λ| from {float(ends[0]):.2g} to {float(ends[-1]):.2g} "
        f"(geometric means over {len(ratio)} trained models; larger in {sum(rises)} of them).",
        "" if all(rises) else "on average, not in every model",
    )
    return Report((chart,), (finding,))


SINK_GPT = Experiment("sink-gpt", "Sinks in a trained GPT", SLIDES, points, measure, report)
