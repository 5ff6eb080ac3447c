"""Does the loss landscape converge with the size of the data set at the rate 1/k?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.comparisons import between, undecided
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.sources import SECOND
from curvlens.papers.sweeps import Sweep, mean
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

STEPS = 200
"""Of training before the landscape is measured."""
RATE = -1.0
TOLERANCE = 0.05
"""Of a slope: as near to the rate 1/k counts as 1/k."""
NAMES = {
    "increment": "the increment of one more sample",
    "distance": "the distance of the loss from its limit",
    "gradient": "the distance of the gradient from its limit",
    "hessian": "the distance of the Hessian from its limit",
}


def points(effort: Effort) -> list[Config]:
    """Trained GPTs on many samples for the loss, and on fewer for gradients and Hessians."""
    samples, few, orders = (512, 32, 40) if effort.quick else (10_240, 384, 200)
    return [
        {"samples": samples, "few": few, "orders": orders, "steps": STEPS, "seed": seed}
        for seed in effort.repeats(2, 5)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Root mean squares and slopes against the number of samples."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=config["steps"])
    x, y = task.batch(config["samples"], seed=10**7 + config["seed"])

    def found(count: int, largest: int, curvature: bool) -> cl.results.Landscape:
        ks = [2**i for i in range(4, 11) if 2**i <= largest] if not curvature else _powers(2, largest)
        problem = cl.Problem(model, (x[:count], y[:count]), cl.losses.CrossEntropy())
        return cl.dynamics.landscape(
            problem, ks=ks, curvature=curvature, orders=config["orders"], probes=2, seed=config["seed"]
        )

    many = found(config["samples"], max(config["samples"] // 10, 32), False)
    few = found(config["few"], config["few"] // 4, True)
    rows = {
        "increment": (many, many.increment),
        "distance": (many, many.distance),
        "gradient": (few, few.gradient_distance),
        "hessian": (few, few.hessian_distance),
    }
    return {
        "k": {name: of.k.tolist() for name, (of, _) in rows.items()},
        "rms": {name: values.tolist() for name, (_, values) in rows.items()},
        "slopes": {name: float(of.slopes[name]) for name, (of, _) in rows.items()},
    }


def _powers(least: int, largest: int) -> list[int]:
    return [2**i for i in range(least, 11) if 2**i <= largest]


def report(records: Sequence[Record]) -> Report:
    """Root mean squares against k, with the lines of both rates, and what the slopes say."""
    panels = []
    for names, title, powers in (
        (("increment", "distance"), "loss", (-1.0, -0.5)),
        (("gradient", "hessian"), "gradient and Hessian", (-0.5, -0.5)),
    ):
        curves = [_sweep(records, name) for name in names]
        panels.append(
            Panel(
                [sweep.curve(name, colour=i) for i, (name, sweep) in enumerate(zip(names, curves, strict=True))],
                [
                    Slope(power, (sweep.x[0], sweep.x[-1]), (sweep.x[0], float(sweep.middle()[0])), f"k^{power:g}")
                    for power, sweep in zip(powers, curves, strict=True)
                ],
                title=title,
                x_label="samples k",
                y_label="root mean square",
                x_scale="log",
                y_scale="log",
            )
        )
    config = records[0].config
    chart = Chart(
        "data-convergence",
        "How the landscape settles as data grow",
        f"A GPT of two layers after {config['steps']} steps of training, over {config['orders']} random orders of "
        f"{config['samples']:,} samples (loss) and of {config['few']} (gradient, Hessian). Left: |L_(k+1) − L_k| and "
        "|L_k − L|. Right: ‖g_k − g‖ and ‖H_k − H‖. Drawing without replacement makes distances smaller by "
        "√(1 − k/N), which is divided out. Geometric means and ranges over the seeds.",
        panels,
    )
    return Report((chart,), (_converges(records),))


def _sweep(records: Sequence[Record], name: str) -> Sweep:
    """The root mean squares of one quantity over k, by seed."""
    values = [list(map(float, record.result["rms"][name])) for record in records]
    return Sweep(tuple(map(float, records[0].result["k"][name])), torch.tensor(values, dtype=torch.float64))


def _converges(records: Sequence[Record]) -> Finding:
    """Which of the four falls like 1/k."""
    slopes = {name: mean("", [float(record.result["slopes"][name]) for record in records]) for name in NAMES}
    told = {
        name: between(slope, RATE - TOLERANCE, RATE + TOLERANCE) if math.isfinite(slope.error) else None
        for name, slope in slopes.items()
    }
    texts = "; ".join(f"{NAMES[name]} k^{slope.value:.3f} ± {slope.error:.1g}" for name, slope in slopes.items())
    return judged_parts(
        "convergence",
        f"Over the seeds: {texts}. A slope within {TOLERANCE:g} of −1 counts as the rate 1/k. An increment that falls "
        "like 1/k is no convergence at that rate: independent samples have distances that fall like 1/√k."
        + undecided(None if None in told.values() else True, len(records)),
        {NAMES[name]: holds for name, holds in told.items()},
    )


DATA_CONVERGENCE = Experiment(
    "data-convergence",
    "How the landscape settles as data grow",
    f"{SECOND}, abstract",
    points,
    measure,
    report,
)
