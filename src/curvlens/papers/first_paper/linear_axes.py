"""Figure 5: the growth of Figure 3a on linear axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper import growth
from curvlens.papers.ranges import LOCAL, extent, following, judged_range, told
from curvlens.papers.sizes import marked
from curvlens.papers.sources import PAPER
from curvlens.papers.verdicts import Finding
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

PRACTICAL = (0.0, 1.0)
"""The range of σ that the paper calls practical."""


def points(effort: Effort) -> list[Config]:
    """Those of Figure 3a, and evenly spaced ones from 0.1 to 1."""
    even = [round(float(x), 6) for x in np.linspace(0.1, 1, 10 if effort.quick else 20)]
    known = growth.points("none", effort, growth.sigmas(effort))
    have = {config["sigma"] for config in known}
    return [*known, *growth.points("none", effort, [sigma for sigma in even if sigma not in have])]


def report(records: Sequence[Record]) -> Report:
    """The data of Figure 3a on linear axes."""
    panels = []
    for low, high in ((0.0, 1.0), (0.0, 10.0)):
        near = [record for record in records if record.config["sigma"] <= high]
        for block, name in (("Q", "query"), ("V", "value")):
            panel = growth.panel(near, block, rf"{name}, $\sigma\in({low:g}, {high:g})$")
            panels.append(Panel(panel.curves, (), panel.title, panel.x_label, panel.y_label))
    chart = Chart(
        "fig5",
        "Growth of the query and value blocks, linear axes",
        "The data of Figure 3a with evenly spaced σ from 0.1 to 1 added, on linear axes: geometric means over the "
        "seeds.",
        panels,
    )
    return Report((chart,), (_practical(records),), notes=marked(records))


def _practical(records: Sequence[Record]) -> Finding:
    """The powers of Equation 5 at all σ of (0, 1), where the points are dense."""
    powers = {"Q": 5, "V": 2}
    curves = {block: growth.curve(records, block, "total").within(*PRACTICAL) for block in powers}
    where = following((curves[block], power) for block, power in powers.items())
    texts = []
    for block, power in powers.items():
        own = following([(curves[block], power)])
        texts.append(f"H({block}) {extent(curves[block])} ({power}; {told(own)})")
    return judged_range(
        "growth-practical",
        f"Local slopes at {len(curves['Q'].x)} σ up to 1 (predicted; where they are within {LOCAL:g} of that): "
        + ", ".join(texts)
        + ".",
        where,
    )


FIG5 = Experiment(
    "fig5",
    "Growth on linear axes",
    f"{PAPER}, Figure 5",
    points,
    growth.measure,
    report,
    data="fig3a",
)
