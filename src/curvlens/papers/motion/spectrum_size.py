"""Whether spectra are wider in larger models: before training, at the lowest loss and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from curvlens.papers.experiment import Experiment, Number, Report
from curvlens.papers.motion.conditioning import STAGES
from curvlens.papers.motion.size_sweep import above, everywhere, line, measure, points, power, said
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Record

WIDTHS = {"range": "λ_max − λ_min", "deviation": "standard deviation"}


def report(records: Sequence[Record]) -> Report:
    """The range of the eigenvalues and their standard deviation against the size of the model."""
    records = [_with_widths(record) for record in records]
    lines = {(stage, name): line(records, stage, "width", name) for stage in STAGES for name in ("range", "deviation")}
    exponents = {
        (stage, name): power(list(everywhere(records, stage, "width", name).values())) for stage, name in lines
    }
    panels = [
        Panel(
            [lines[stage, name].curve(STAGES[stage], colour=i) for i, stage in enumerate(STAGES)],
            title=title,
            x_label="parameters N",
            y_label=label,
            x_scale="log",
            y_scale="log",
        )
        for name, title, label in (
            ("range", "range of the eigenvalues", r"$\lambda_{\max}-\lambda_{\min}$"),
            ("deviation", "their standard deviation", "standard deviation"),
        )
    ]
    chart = Chart(
        "spectrum-size",
        "Spectra and the size of the model",
        "GPTs of several widths learn to add from equally many samples. The Hessian is that of the loss on these.",
        panels,
    )
    return Report((chart,), (_wider(exponents),), notes=tuple(marked(records, "width", "width")))


def _with_widths(record: Record) -> Record:
    """With the range of all eigenvalues, and their standard deviation from trace and Frobenius norm."""
    v = record.result["values"]
    n = v["parameters"]
    variance = v["frobenius"] ** 2 / n - (v["trace"] / n) ** 2
    widths = {"range": v["lambda_max"] - v["lambda_min"], "deviation": math.sqrt(max(variance, 0.0))}
    return replace(record, result={**record.result, "values": {**v, **widths}})


def _wider(exponents: dict[tuple[str, str], Number]) -> Finding:
    """Whether both exponents in N are positive, at every stage, over the seeds."""
    texts = "; ".join(
        f"{STAGES[stage]} {', '.join(f'{WIDTHS[name]} N^({said(exponents[stage, name])})' for name in WIDTHS)}"
        for stage in STAGES
    )
    return judged_parts(
        "spectrum-size",
        "The width of the spectrum of H as a power of the number of parameters N, means over all measured sizes of the "
        f"data, then over the seeds with their 95 % intervals: {texts}. Wider means a power above 0.",
        {f"{WIDTHS[name]} {STAGES[stage]}": above(each) for (stage, name), each in exponents.items()},
    )


SPECTRUM_SIZE = Experiment(
    "spectrum-size",
    "Spectra and the size of the model",
    f"{ARTICLE}, Section 7.2",
    points,
    measure,
    report,
    data="scaling",
)
