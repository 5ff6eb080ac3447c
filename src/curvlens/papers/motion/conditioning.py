"""Whether Hessians are better conditioned with more data: before training, at the lowest loss and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from curvlens.papers.experiment import Experiment, Number, Report
from curvlens.papers.motion.size_sweep import below, everywhere, line, measure, points, power, said
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Record

BETTER = math.log10(0.9)
"""The power of D at which ten times the data lower the condition number by a tenth."""
STAGES = {"start": "before training", "best": "at the lowest loss on other pairs", "end": "after the last step"}


def report(records: Sequence[Record]) -> Report:
    """The condition number and the effective rank against the number of samples."""
    lines = {stage: line(records, stage, "samples", "condition") for stage in STAGES}
    exponents = {
        STAGES[stage]: power(list(everywhere(records, stage, "samples", "condition").values())) for stage in STAGES
    }
    axes = {"x_label": "training samples D", "x_scale": "log", "y_scale": "log"}
    panels = [
        Panel(
            [each.curve(STAGES[stage], colour=i) for i, (stage, each) in enumerate(lines.items())],
            title="condition number of the top 10 of G",
            y_label=r"$\lambda_1/\lambda_{10}$",
            **axes,  # type: ignore[arg-type]
        ),
        Panel(
            [
                line(records, stage, "samples", "lambda_max").curve(STAGES[stage], colour=i)
                for i, stage in enumerate(STAGES)
            ],
            title="largest eigenvalue of H",
            y_label=r"$\lambda_{\max}$",
            **axes,  # type: ignore[arg-type]
        ),
    ]
    chart = Chart(
        "conditioning",
        "Conditioning and the size of the data",
        "A GPT learns to add from D distinct samples. The condition number is that of the Gauss–Newton matrix on the "
        "training samples in the subspace of its ten largest eigenvalues: the whole matrix is singular.",
        panels,
    )
    return Report((chart,), (_conditioning(exponents),), notes=tuple(marked(records, "samples", "samples")))


def _conditioning(exponents: dict[str, Number]) -> Finding:
    """Whether the condition number falls with D, at every stage, over the seeds."""
    texts = "; ".join(f"{stage} D^({said(each)})" for stage, each in exponents.items())
    return judged_parts(
        "conditioning-data",
        "The condition number λ₁/λ₁₀ of the Gauss–Newton matrix on D training samples, as a power of D, means over "
        f"all measured sizes of the model, then over the seeds with their 95 % intervals: {texts}. Better conditioned "
        f"means a tenth lower for ten times the data: a power below {BETTER:.3f}.",
        {stage: below(each, BETTER) for stage, each in exponents.items()},
    )


CONDITIONING = Experiment(
    "conditioning",
    "Conditioning and the size of the data",
    f"{ARTICLE}, Sections 6.1 and 7.2",
    points,
    measure,
    report,
    data="scaling",
)
