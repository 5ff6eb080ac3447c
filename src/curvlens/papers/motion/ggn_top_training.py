"""The largest eigenvalue of the Hessian and of its Gauss–Newton part while a GPT learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.papers.comparisons import between
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices
from curvlens.papers.learners import trained
from curvlens.papers.shown import with_error
from curvlens.papers.sources import OUTLIERS
from curvlens.papers.sweeps import Sweep, mean, sweep
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

SAMPLES = 32
NEAR, HALF = 0.25, 0.5
"""An eigenvalue is that of the Hessian if it differs by less than a quarter, and more than half of its vector, in
squares, is along that of the Hessian."""


def points(effort: Effort) -> list[Config]:
    """A GPT of two layers at initialisation and while it learns."""
    steps = (0, 100) if effort.quick else (0, 10, 50, 200, 800)
    return [{"steps": step, "seed": seed} for seed in effort.repeats(2, 14) for step in steps]


def measure(config: Config) -> Mapping[str, Any]:
    """Both eigenvalues, the overlap of their vectors, and the norms of the parts."""
    model = trained(Addition(digits=2), seed=config["seed"], steps=config["steps"])
    H, G, _ = matrices(model, SAMPLES)
    (h, x), (g, y) = (torch.linalg.eigh(matrix) for matrix in (H, G))
    return {
        "H": float(h[-1]),
        "G": float(g[-1]),
        "overlap": float((x[:, -1] @ y[:, -1]).square()),
        "functional": float((H - G).norm() / H.norm()),
    }


def report(records: Sequence[Record]) -> Report:
    """Both eigenvalues and the overlap of their vectors over the training."""
    lines = {name: sweep(records, "steps", name) for name in ("H", "G", "overlap", "functional")}
    steps = lines["H"].x
    ticks = ([float(i) for i in range(len(steps))], [f"{step:g}" for step in steps])
    staged = {name: Sweep(tuple(ticks[0]), line.values) for name, line in lines.items()}
    axes: dict[str, Any] = {"x_label": "training steps (not to scale)", "ticks": ticks}
    chart = Chart(
        "ggn-top-training",
        "The Gauss–Newton matrix at the top of the spectrum, while a GPT learns",
        "A GPT of two layers that learns to add. Left: the largest eigenvalues of the Hessian H and of its "
        "Gauss–Newton part G. Right: the square of the inner product of their vectors, and ‖H − G‖/‖H‖. Means over "
        "the seeds and their 95 % intervals.",
        [
            Panel(
                [staged["H"].curve("H"), staged["G"].curve("G", colour=1)],
                y_label=r"$\lambda_{\max}$",
                y_scale="log",
                **axes,
            ),
            Panel(
                [
                    staged["overlap"].curve("overlap of the vectors", shares=True),
                    staged["functional"].curve("‖H − G‖/‖H‖", shares=True, colour=1),
                ],
                y_label="share",
                **axes,
            ),
        ],
    )
    return Report((chart,), (_same(lines),))


def _same(lines: Mapping[str, Sweep]) -> Finding:
    parts: dict[str, bool | None] = {}
    texts = []
    for i, step in enumerate(lines["H"].x):
        h, g = lines["H"].values[:, i], lines["G"].values[:, i]
        apart, overlap = (mean("", x.tolist()) for x in ((g / h - 1).abs(), lines["overlap"].values[:, i]))
        parts[f"after {step:g} steps"] = all_of((between(apart, -math.inf, NEAR), between(overlap, HALF, math.inf)))
        said = (with_error(each.value, each.error) for each in (apart, overlap))
        texts.append(f"after {step:g} steps {' and '.join(said)}")
    return judged_parts(
        "ggn-top-training",
        "The relative difference of the largest eigenvalue of the Gauss–Newton part from that of the Hessian, and the "
        f"square of the inner product of their vectors: {'; '.join(texts)}. Means over the seeds with their 95 % "
        f"intervals; they are the same if the first is below {NEAR:g} and the second above {HALF:g}.",
        parts,
    )


GGN_TOP_TRAINING = Experiment(
    "ggn-top-training",
    "The Gauss–Newton matrix at the top of the spectrum, while a GPT learns",
    OUTLIERS,
    points,
    measure,
    report,
)
