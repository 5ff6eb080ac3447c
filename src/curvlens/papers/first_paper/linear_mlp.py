"""Figure 8: linear MLPs, whose blocks grow with σ² at any depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from curvlens.calculus import linear_mlp
from curvlens.data import Addition
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.depths import depths
from curvlens.papers.ranges import following, judged_range, told
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import farthest, grid, sweep, where
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

SIGMAS = (0.01, 10.0)
SEQUENCES = 64
EXACTLY = 0.001
"""How far a local slope may be from the power of a network that is linear in its data."""


def points(effort: Effort) -> list[Config]:
    """Linear MLPs of one to five layers."""
    count, width = (6, 32) if effort.quick else (13, 128)
    return [
        {"depth": depth, "width": width, "sigma": sigma, "seed": seed}
        for depth in (1, 2, 3, 4, 5)
        for seed in effort.repeats(3, 10)
        for sigma in grid(*SIGMAS, count)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of the diagonal blocks, and the largest of the functional part, which are zero."""
    depth, width = config["depth"], config["width"]
    draw = Draws(config["seed"])
    task = Addition()
    ids, labels = task.batch(SEQUENCES, seed=config["seed"])
    x = config["sigma"] * draw(task.vocab, width)[ids]
    sizes = [width] * depth + [task.vocab]
    weights = [draw(b, a, scale=0.8 / math.sqrt(a)) for a, b in pairwise(sizes)]
    counted = labels >= 0
    target = nn.functional.one_hot(labels[counted], task.vocab).to(x)
    H = linear_mlp.hessian(x[counted], weights, target)
    names = [f"W{i + 1}" for i in range(depth)]
    return {
        "norms": [sized(H.total.norm(name)) for name in names],
        "functional": max(H.functional.norm(name) for name in names),
    }


def report(records: Sequence[Record]) -> Report:
    """2 at any depth."""
    panels, slopes, every = [], [], []
    for depth in depths(records):
        of = where(records, depth=depth)
        lines = [sweep(of, "sigma", "norms", i) for i in range(depth)]
        slopes += [line.slope("fig8 slope", SIGMAS) for line in lines]
        every += lines
        first = lines[0].curve("")
        guide = Slope(2, (first.x[0], first.x[-1]), (first.x[0], first.y[0] / 4), r"$\sigma^2$")
        curves = [line.curve(f"layer {i + 1}", colour=i) for i, line in enumerate(lines)]
        panels.append(Panel(curves, [guide], f"depth {depth}", r"$\sigma$", r"$\|H\|_F$", "log", "log"))
    worst = farthest(slopes, 2)
    hollow = max(record.result["functional"] for record in records)
    chart = Chart(
        "fig8",
        "Linear MLPs in depth over the size of the embeddings",
        f"Norms of the diagonal blocks of linear MLPs of width {records[0].config['width']}, square loss over "
        f"{SEQUENCES} sequences; tokens are embedded, positions are not. Dashed grey: σ², drawn a little below.",
        panels,
        columns=3,
    )
    found = following([(line, 2.0) for line in every], EXACTLY)
    finding = judged_range(
        "depth-mlp",
        f"Of all depths and layers the slope farthest from 2 is {worst.value:.6f}; local slopes are within {EXACTLY:g} "
        f"of 2 for {told(found)}. The functional part of the diagonal blocks is {hollow:g} in closed form.",
        found,
    )
    return Report((chart,), (finding,), (worst,), (), marked(records))


FIG8 = Experiment("fig8", "Linear MLPs in depth", f"{PAPER}, Figure 8", points, measure, report)
