"""Attention sinks in scalar attention: what a bias towards the first token does to bulk and outliers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import scalar_attention
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.slides.scalar_layer import scalar_layer
from curvlens.experiments.sources import SLIDES
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel


def points(effort: Effort) -> list[Config]:
    """A bias towards the first token; the first token as the others, or an outlier."""
    return [
        {"sink": sink, "first": first, "seed": seed}
        for first in (1.0, 5.0)
        for seed in effort.repeats(20, 100)
        for sink in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Bulk and outliers."""
    x, q, k, v, y = scalar_layer(config["seed"], 8, 1.0)
    x[:, 0] *= config["first"]
    found = scalar_attention.spectrum(x, q, k, v, y, sink=config["sink"])
    return {"bulk": found.bulk.value, "top": float(found.outliers.abs().max())}


def report(records: Sequence[Record]) -> Report:
    """Whether the bulk shrinks and the outliers grow."""
    panels, texts, shrinks, grows = [], [], [], []
    for first, name in ((1.0, "first token as the others"), (5.0, "first token five times as large")):
        of = where(records, first=first)
        bulk, top = sweep(of, "sink", "bulk"), sweep(of, "sink", "top")
        panels.append(
            Panel(
                [bulk.curve(r"bulk $|\mu|$"), top.curve("largest outlier", colour=1)],
                (),
                name,
                "bias towards the first token",
                r"$|\lambda|$",
                y_scale="log",
            )
        )
        ends = [[float(e) for e in line.middle()[[0, -1]]] for line in (bulk, top)]
        shrinks.append(ends[0][1] < ends[0][0])
        grows.append(ends[1][1] > ends[1][0])
        texts.append(
            f"{name}: bulk {ends[0][0]:.2g} → {ends[0][1]:.2g}, largest outlier {ends[1][0]:.2g} → {ends[1][1]:.2g}"
        )
    chart = Chart(
        "sink-scalar",
        "Attention sinks in scalar attention",
        "A bias of the scores towards the first token: geometric mean over the seeds with its 95 % interval.",
        panels,
    )
    everywhere = all(shrinks) and all(grows)
    finding = Finding(
        "sink-scalar",
        "holds" if everywhere else "holds when" if all(shrinks) and any(grows) else "does not hold",
        "Sink from 0 to 8, geometric means: " + "; ".join(texts) + ".",
        ""
        if everywhere
        else "the bulk always; the outliers " + ("with an outlier at the sink" if grows[1] else "without one"),
    )
    return Report((chart,), (finding,))


SINK = Experiment("sink-scalar", "Sinks in scalar attention", SLIDES, points, measure, report)
