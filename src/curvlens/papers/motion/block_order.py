"""The order of the blocks by mean curvature per parameter, in a GPT that learns to add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.papers.comparisons import DOMINATES, ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices, rows
from curvlens.papers.learners import trained
from curvlens.papers.sources import BLOCK_ORDER
from curvlens.papers.sweeps import Sweep, bars, mean, sweep
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

ROLES = {
    "Emb": ("embed",),
    "QK": ("h.0.attn.q", "h.0.attn.k", "h.1.attn.q", "h.1.attn.k"),
    "FFN": ("h.0.mlp", "h.1.mlp"),
    "VO": ("h.0.attn.v", "h.0.attn.o", "h.1.attn.v", "h.1.attn.o"),
    "Norm": ("h.0.norm", "h.1.norm", "final_norm"),
}
"""In the published order, by the beginnings of their parameters' names."""
MUCH = {("Emb", "QK"), ("VO", "Norm")}
"""Neighbours that are to be far apart: by more than a factor of two."""
PARTS = ("H", "G")
SAMPLES = 32


def points(effort: Effort) -> list[Config]:
    """A GPT of two layers at initialisation and while it learns."""
    steps = (0, 100) if effort.quick else (0, 50, 100, 200, 400, 800)
    return [{"steps": step, "seed": seed} for seed in effort.repeats(2, 8) for step in steps]


def measure(config: Config) -> Mapping[str, Any]:
    """tr/size of every role, of the Hessian and of its Gauss–Newton part, exact."""
    model = trained(Addition(digits=2), seed=config["seed"], steps=config["steps"])
    H, G, places = matrices(model, SAMPLES)
    of = {role: torch.cat([rows(places, prefix) for prefix in prefixes]) for role, prefixes in ROLES.items()}
    return {
        name: {role: float(matrix.diagonal()[own].mean()) for role, own in of.items()}
        for name, matrix in (("H", H), ("G", G))
    }


def report(records: Sequence[Record]) -> Report:
    """Mean curvatures over the training, and their order at its end."""
    lines = {part: {role: sweep(records, "steps", part, role) for role in ROLES} for part in PARTS}
    steps = lines["G"]["Emb"].x
    end = [[mean("", line.values[:, -1].tolist()) for line in lines[part].values()] for part in PARTS]
    after = Panel(
        [bars(f"tr {part} / size", found, i) for i, (part, found) in enumerate(zip(PARTS, end, strict=True))],
        title=f"after {steps[-1]:g} steps, in the published order",
        y_label="mean curvature per parameter",
        ticks=([float(i) for i in range(len(ROLES))], list(ROLES)),
    )
    places = [float(i) for i in range(len(steps))]
    course = Panel(
        [Sweep(tuple(places), line.values).curve(role, colour=i) for i, (role, line) in enumerate(lines["G"].items())],
        title="the Gauss–Newton part",
        x_label="training steps (not to scale)",
        y_label="tr G / size",
        y_scale="log",
        ticks=(places, [f"{step:g}" for step in steps]),
    )
    chart = Chart(
        "block-order",
        "Mean curvature per parameter, by role",
        "A GPT of two layers that learns to add: the trace of each role's blocks over their number of parameters. "
        "Published for language models: Emb ≪ QK < FFN < VO ≪ Norm. Left: of the Hessian and of its Gauss–Newton part "
        "at the end, means over the seeds. Right: of the Gauss–Newton part, geometric means. 95 % intervals.",
        [after, course],
    )
    return Report((chart,), (_order(lines["G"], lines["H"]),))


def _order(lines: Mapping[str, Sweep], whole: Mapping[str, Sweep]) -> Finding:
    """Neighbours in the published order, of the Gauss–Newton part after training: its traces are not negative."""
    roles = list(ROLES)
    parts: dict[str, bool | None] = {}
    texts = []
    for low, high in pairwise(roles):
        found = ratio(lines[high].values[:, -1], lines[low].values[:, -1])
        sign = "≪" if (low, high) in MUCH else "<"
        parts[f"{low} {sign} {high}"] = found.above(DOMINATES if (low, high) in MUCH else 1.0)
        texts.append(f"{high} over {low} {found}")
    means = {role: float(line.values[:, -1].mean()) for role, line in whole.items()}
    order = " < ".join(sorted(roles, key=lambda role: float(lines[role].middle()[-1])))
    ordered = " < ".join(sorted(roles, key=means.__getitem__))
    return judged_parts(
        "block-order",
        f"Mean curvature per parameter, tr G/size, after {lines['Emb'].x[-1]:g} steps: {order}; {'; '.join(texts)}. "
        f"Geometric means over the seeds with their 95 % intervals; ≪ is by more than a factor of {DOMINATES:g}. By "
        f"tr H/size, means over the seeds: {ordered}.",
        parts,
    )


BLOCK_ORDER_EXPERIMENT = Experiment(
    "block-order",
    "The order of the blocks by mean curvature per parameter",
    BLOCK_ORDER,
    points,
    measure,
    report,
)
