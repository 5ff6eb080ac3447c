"""Scaling laws: how curvature depends on the size of the data, and whether it helps to predict the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from curvlens.dynamics.fits import left_out, loss_law
from curvlens.papers.comparisons import Ratio, between, ratio
from curvlens.papers.experiment import Experiment, Number, Report
from curvlens.papers.motion.size_sweep import everywhere, measure, points, power, said, table
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel, Slope
from curvlens.study import Record

PREDICTED, NEAR = -0.5, 0.1
"""The exponent of the article, and how near to it a measured one has to be."""
NORMS = {"spectral norm": "spectral", "Frobenius norm": "frobenius", "condition number": "condition"}
CURVATURE = {"spectral": "the spectral norm", "condition": "the condition number"}
HELPS = 0.9
"""The error of predictions, over that without curvature, below which curvature explains something."""


def report(records: Sequence[Record]) -> Report:
    """Curvature and loss against the number of samples, the loss law, and predictions with and without curvature."""
    records = [_with_norm(record) for record in records]
    law = loss_law(table(records, stage="best"), bootstrap=100)
    gains, beside = _gains(records), _gains(records, ["train_loss"])
    losses, norms = (everywhere(records, "best", "samples", name) for name in ("test_loss", "spectral"))
    sizes = {r.config["width"]: r.result["values"]["parameters"] for r in where(records, stage="best")}
    axes: dict[str, Any] = {"x_label": "training samples D", "x_scale": "log", "y_scale": "log"}
    fitted = [
        Curve("", each.x, [law(sizes[width], x) for x in each.x], colour=i, style="dashed", marker=False)
        for i, (width, each) in enumerate(losses.items())
    ]
    panels = [
        Panel(
            [*_curves(losses, sizes), *fitted],
            title="test loss (dashed: the loss law)",
            y_label="test loss",
            **axes,
        ),
        Panel(_curves(norms, sizes), [_slope(norms)], title="spectral norm of H", y_label=r"$\|H\|_2$", **axes),
        Panel(
            _curves(everywhere(records, "best", "samples", "condition"), sizes),
            title="condition number of the top 10 of G",
            y_label=r"$\lambda_1/\lambda_{10}$",
            **axes,
        ),
        Panel(
            [_bars(gains, "beside the loss law"), _bars(beside, "beside law and training loss", 1)],
            title="error of predictions, over without curvature",
            y_label="ratio",
            ticks=([0, 1], [r"$\|H\|_2$", r"$\lambda_1/\lambda_{10}$"]),
        ),
    ]
    chart = Chart(
        "scaling",
        "Loss and curvature against the size of the data",
        "GPTs of four sizes learn to add from D distinct samples, each at its lowest loss on other pairs. The Hessian "
        "is that of the loss on the training samples. Last: settings (N, D) are left out in turn, and their loss is "
        "predicted by L = E + A/N^α + B/D^β with a power of the curvature beside it, over the same without.",
        panels,
    )
    return Report(
        (chart,),
        (_exponents(records), _explained(gains, beside)),
        notes=(f"The loss law of all seeds: {law}.", *marked(records, "samples", "samples")),
    )


def _with_norm(record: Record) -> Record:
    """With the spectral norm beside both ends of the spectrum."""
    values = record.result["values"]
    spectral = max(values["lambda_max"], -values["lambda_min"])
    return replace(record, result={**record.result, "values": {**values, "spectral": spectral}})


def _gains(records: Sequence[Record], beside: Sequence[str] = ()) -> dict[str, Ratio]:
    """The error of predictions with curvature over that without, of each seed by itself."""
    found: dict[str, list[float]] = {}
    for seed in sorted({record.config["seed"] for record in records}):
        rows = table(records, stage="best", seed=seed)
        without = left_out(rows, beside).mean()
        for name in CURVATURE:
            found.setdefault(name, []).append(float(left_out(rows, [*beside, name]).mean() / without))
    return {name: ratio(torch.tensor(each), torch.ones(len(each))) for name, each in found.items()}


def _exponents(records: Sequence[Record]) -> Finding:
    """Of norms and the condition number in D, over the seeds."""
    lines = {name: everywhere(records, "best", "samples", key) for name, key in NORMS.items()}
    exponents: dict[str, Number] = {name: power(list(each.values())) for name, each in lines.items()}
    texts = "; ".join(f"{name} D^({said(each)})" for name, each in exponents.items())
    return judged_parts(
        "scaling-exponents",
        "Exponents in the number of samples D of models at their lowest loss, means over four sizes, then over the "
        f"seeds with their 95 % intervals: {texts}. Predicted is D^-0.5, to {NEAR:g}.",
        {name: between(each, PREDICTED - NEAR, PREDICTED + NEAR) for name, each in exponents.items()},
    )


def _explained(gains: dict[str, Ratio], beside: dict[str, Ratio]) -> Finding:
    """Whether predictions are better with curvature, over the seeds."""
    texts = "; ".join(f"{CURVATURE[name]} {each}" for name, each in gains.items())
    more = "; ".join(f"{CURVATURE[name]} {each}" for name, each in beside.items())
    return judged_parts(
        "scaling-explained",
        "Every setting of model and data size is left out in turn, and its test loss is predicted by L = E + A/N^α + "
        "B/D^β. The error with a power of the curvature beside it, over that without (geometric means over the seeds "
        f"with their 95 % intervals): {texts}. If both also know the training loss: {more}. A curvature that explains "
        f"the law would make the error smaller at least: a ratio below {HELPS:g}.",
        {
            f"a prediction by {CURVATURE[name]}{also}": each.below(HELPS)
            for also, found in (("", gains), (" beside the training loss", beside))
            for name, each in found.items()
        },
    )


def _curves(lines: dict[Any, Sweep], sizes: dict[Any, float]) -> list[Curve]:
    return [each.curve(f"N = {sizes[width]:g}", colour=i) for i, (width, each) in enumerate(lines.items())]


def _slope(lines: dict[Any, Sweep]) -> Slope:
    """The predicted power, through the middle of the first line."""
    first = next(iter(lines.values()))
    return Slope(PREDICTED, (first.x[0], first.x[-1]), (first.x[0], float(first.middle()[0])), r"$D^{-1/2}$")


def _bars(gains: dict[str, Ratio], label: str, colour: int = 0) -> Curve:
    x, y = list(range(len(gains))), [each.value for each in gains.values()]
    low, high = ([getattr(each, end) for each in gains.values()] for end in ("low", "high"))
    return Curve(label, x, y, low, high, colour=colour, style="bars")


SCALING = Experiment(
    "scaling",
    "Loss and curvature against the size of the data",
    f"{ARTICLE}, Sections 7 and 9.2",
    points,
    measure,
    report,
)
