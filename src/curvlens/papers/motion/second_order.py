"""Does the second-order term dominate what one more sample changes in the loss landscape?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

AROUND = {"all": "all directions", "top": "the top five eigenvectors"}
STAGES = {0: "at initialisation", 400: "after training"}
RADII = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
AGREEMENT = 0.25
"""Of E D²: the true one and that of the quadratic model agree to this, or within twice the sampling error."""
NOISE = 0.5
"""Of E D²: twice the sampling error, beyond which agreement means nothing."""


def points(effort: Effort) -> list[Config]:
    """GPTs before and after training, in all directions and in the span of the top eigenvectors."""
    samples, count, drawn = (16, 20, 4) if effort.quick else (24, 200, 20)
    return [
        {"steps": steps, "around": around, "samples": samples, "orders": count, "points": drawn, "seed": seed}
        for seed in effort.repeats(2, 4)
        for steps in STAGES
        for around in AROUND
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """√E D² of the three terms at each radius, the true √E D², and the radius up to which they agree."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=config["steps"])
    problem = cl.Problem(model, task.batch(config["samples"], seed=10**7 + config["seed"]), cl.losses.CrossEntropy())
    basis = None
    if config["around"] == "top":
        basis = cl.eigs(cl.hessian(problem), 5, tol=1e-3, seed=config["seed"]).vectors.T.contiguous()
    found = cl.dynamics.landscape(
        problem,
        RADII,
        basis=basis,
        ks=[config["samples"] // 2],
        orders=config["orders"],
        points=config["points"],
        probes=8,
        seed=config["seed"],
    )
    assert found.terms is not None
    roots = found.terms[:, :, 0].clamp(min=0).sqrt().tolist()
    return {
        **dict(zip(_NAMES, roots, strict=True)),
        "true": found.true_second[:, 0].clamp(min=0).sqrt().tolist(),
        "holds": reach(found.second[:, 0], found.true_second[:, 0], found.true_error[:, 0]),
        "gradient": found.gradient_norm,
    }


def reach(model: Tensor, true: Tensor, error: Tensor) -> float | None:
    """The largest radius at which the second moments agree, with all smaller ones."""
    well = ((true - model).abs() <= (AGREEMENT * model).maximum(2 * error)) & (2 * error <= NOISE * model)
    count = int(well.long().cumprod(0).sum())
    return RADII[count - 1] if count else None


def report(records: Sequence[Record]) -> Report:
    """The three terms against the radius, and whether the last one is larger than both others."""
    panels = []
    for steps, stage in STAGES.items():
        for around, where_to in AROUND.items():
            of = where(records, steps=steps, around=around)
            names = ("constant", "linear", "quadratic", "true")
            panels.append(
                Panel(
                    [
                        _sweep(of, name).curve(name, colour=i, style="dashed" if name == "true" else "solid")
                        for i, name in enumerate(names)
                    ],
                    title=f"{where_to}, {stage}",
                    x_label="distance from the model",
                    y_label=r"$\sqrt{E D^2}$",
                    x_scale="log",
                    y_scale="log",
                )
            )
    chart = Chart(
        "second-order",
        "The terms of the Taylor expansion",
        f"A GPT of two layers. D = (k + 1)(L_(k+1) − L_k) for k half of {records[0].config['samples']} samples, at "
        "points at a distance from the model: the root mean squares of its constant, linear and quadratic terms by the "
        "closed form, and its true value at random points. Geometric means and ranges over the seeds.",
        panels,
    )
    return Report((chart,), (_dominates(records),))


def _sweep(records: Sequence[Record], name: str) -> Sweep:
    values = [list(map(float, record.result[name])) for record in records]
    return Sweep(RADII, torch.tensor(values, dtype=torch.float64).clamp(min=1e-12))


def _dominates(records: Sequence[Record]) -> Finding:
    """At the largest radius where the quadratic model holds: the quadratic term over the two others together."""
    parts: dict[str, bool | None] = {}
    texts = []
    for steps, stage in STAGES.items():
        for around, place in AROUND.items():
            of = where(records, steps=steps, around=around)
            found = _over(of)
            holds = [record.result["holds"] for record in of if record.result["holds"] is not None]
            reach = f" at {min(map(float, holds)):g} to {max(map(float, holds)):g}" if holds else ""
            parts[f"{stage}, {place}"] = found.above()
            texts.append(f"{stage}, {place} {found}{reach}")
    return judged_parts(
        "second-order",
        "The quadratic term of D over the constant and the linear one together (root mean squares by the closed form), "
        "at the largest of the measured distances up to which E D² of the quadratic model agrees with the true one to "
        f"{AGREEMENT:.0%}, geometric means over the seeds with their 95 % intervals: {'; '.join(texts)}. It dominates "
        "above 1.",
        parts,
    )


def _over(records: Sequence[Record]) -> Ratio:
    above, below = [], []
    for record in records:
        holds = record.result["holds"]
        place = RADII.index(float(holds)) if holds is not None else None
        row = {name: float(record.result[name][place]) if place is not None else math.nan for name in _NAMES}
        above.append(max(row["quadratic"], 1e-12))
        below.append(math.hypot(row["constant"], row["linear"]))
    return ratio(torch.tensor(above, dtype=torch.float64), torch.tensor(below, dtype=torch.float64))


_NAMES = ("constant", "linear", "quadratic")

SECOND_ORDER = Experiment(
    "second-order",
    "The terms of the Taylor expansion",
    f"{ARTICLE}, Section 8.3",
    points,
    measure,
    report,
    revision=2,
)
