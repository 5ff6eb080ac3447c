"""Attention sinks in scalar attention: what a bias towards the first token does to bulk and outliers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import scalar_attention
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.sizes import marked
from curvlens.papers.slides.scalar_layer import scalar_layer
from curvlens.papers.slides.sensitivity import changes
from curvlens.papers.sources import SLIDES
from curvlens.papers.sweeps import Sweep, sweep, where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

FIRST = {1.0: "first token as the others", 5.0: "first token five times as large"}


def points(effort: Effort) -> list[Config]:
    """A bias towards the first token; the first token as the others, or an outlier."""
    return [
        {"sink": sink, "first": first, "seed": seed}
        for first in FIRST
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
    """What a sink does to bulk and outliers, and what an outlier among the tokens does without one."""
    panels = []
    for first, name in FIRST.items():
        of = where(records, first=first)
        bulk, top = _lines(of)
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
    chart = Chart(
        "sink-scalar",
        "Attention sinks in scalar attention",
        "A bias of the scores towards the first token: geometric mean over the seeds with its 95 % interval.",
        panels,
    )
    return Report((chart,), (_sink(records), _outlier(records)), notes=marked(records, "sink", "biases"))


def _sink(records: Sequence[Record]) -> Finding:
    """From no sink to every size of one, in pairs of one seed: at all of them, or at those that are named."""
    parts: dict[str, bool | None] = {}
    texts = []
    for first, name in FIRST.items():
        bulk, top = _lines(where(records, first=first))
        claims = ((bulk, Ratio.below, "Bulk", "the bulk shrinks"), (top, Ratio.above, "Outliers", "the outliers grow"))
        for line, as_claimed, title, what in claims:
            found = {sink: ratio(line.values[:, i], line.values[:, 0]) for i, sink in enumerate(line.x) if i}
            true = {sink: as_claimed(each) for sink, each in found.items()}
            parts[f"{what}, {name}"] = everywhere = all_of(true.values())
            at = [f"{sink:g}" for sink, holds in true.items() if holds]
            if at and not everywhere:
                parts[f"{what} at a bias of {', '.join(at)}, {name}"] = True
            texts.append(f"{title}, {name}: {'; '.join(f'{sink:g}: {each}' for sink, each in found.items())}")
    return judged_parts(
        "sink-scalar",
        "With a bias over without, for each bias, geometric means over the seeds with their 95 % intervals. "
        f"{'. '.join(texts)}. It has to be so at every bias; of the outliers the largest is taken.",
        parts,
    )


def _outlier(records: Sequence[Record]) -> Finding:
    """The first token as the others, or an outlier, both without a sink."""
    small, large = sorted(FIRST)
    before, after = (_lines(where(records, first=first, sink=0.0)) for first in (small, large))
    bulk, top = (ratio(b.values[:, 0], a.values[:, 0]) for a, b in zip(before, after, strict=True))
    factor = large / small
    return judged_parts(
        "outlier-activations",
        f"Without a sink, a first token {factor:g} times as large over one as the others, geometric means over the "
        f"seeds with their 95 % intervals: bulk {bulk}, largest outlier {top}. A number is sensitive if it changes by "
        "more than the token.",
        {"the bulk": changes(bulk, factor), "the outliers": changes(top, factor)},
    )


def _lines(records: Sequence[Record]) -> tuple[Sweep, Sweep]:
    """Bulk and largest outlier over the sink."""
    return sweep(records, "sink", "bulk"), sweep(records, "sink", "top")


SINK = Experiment("sink-scalar", "Sinks in scalar attention", SLIDES, points, measure, report)
