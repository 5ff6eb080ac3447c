"""Figures 1 and 4: how large the entries of the query and the value block are, with softmax and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.papers.comparisons import between, seeds, undecided
from curvlens.papers.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.papers.setting import Kind, block_hessian
from curvlens.papers.sizes import negative_share, number
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import mean, where
from curvlens.papers.verdicts import Finding, all_of, judged, judged_parts
from curvlens.report.charts import Chart, Curve, Heat, Panel
from curvlens.study import Config, Record

WIDTH, SIGMA = 16, 0.2
SIGMAS = (0.05, 0.1, 0.14, 0.2, 0.28, 0.5, 1.0, 2.0)
"""Sizes of the embeddings at which the claim on entries is tested; the figures use size SIGMA."""
EDGES = tuple(-12 + 0.25 * i for i in range(45))
"""Of the histogram of log₁₀ |entry|, from −12 to −1."""
BLOCKS = ("Q", "K", "V")
ABOUT_TWO = (1.5, 2.5)
"""Orders of magnitude that are about two."""
SAME = 0.3
"""Orders of magnitude within which sizes are the same: a factor of two."""
ORDER = 1.0
"""Orders of magnitude beyond which a size has changed."""
CELLS = 24
"""Rows of a block in the heat map; a cell shows the root mean square of its entries."""


def _points(kind: Kind, effort: Effort) -> list[Config]:
    return [{"width": WIDTH, "sigma": SIGMA, "kind": kind, "seed": seed} for seed in effort.repeats(5, 400)]


def points_1(effort: Effort) -> list[Config]:
    """Softmax attention, with few seeds at other sizes of the embeddings."""
    others = [
        {"width": WIDTH, "sigma": sigma, "kind": "softmax", "seed": seed}
        for sigma in SIGMAS
        if sigma != SIGMA
        for seed in effort.repeats(5, 50)
    ]
    return [*_points("softmax", effort), *others]


def points_4(effort: Effort) -> list[Config]:
    """And linear attention."""
    return [*_points("softmax", effort), *_points("linear", effort)]


def measure(config: Config) -> Mapping[str, Any]:
    """Medians and histograms of log₁₀ |H|, the negative share of each diagonal block, and a heat map for one seed."""
    H = block_hessian(config["width"], sigma=config["sigma"], seed=config["seed"], kind=config["kind"])
    found: dict[str, Any] = {"median": {}, "histogram": {}, "negative": {}}
    for block in BLOCKS:
        matrix = H.total[block]
        logs = matrix[matrix != 0].abs().log10()
        found["median"][block] = float(logs.median())
        inside = logs.clamp(EDGES[0] + 1e-9, EDGES[-1] - 1e-9)
        counts = torch.histogram(inside, torch.tensor(EDGES, dtype=torch.float64)).hist
        found["histogram"][block] = [int(count) for count in counts.tolist()]
        found["negative"][block] = negative_share(matrix)
    if config["seed"] == 0:
        found["heat"] = [[_cells(H.total[a, b]) for b in BLOCKS] for a in BLOCKS]
    return found


def _cells(block: Tensor) -> list[list[float]]:
    """log₁₀ of root mean squares over equal cells."""
    parts = [[cell.square().mean() for cell in row.tensor_split(CELLS, 1)] for row in block.tensor_split(CELLS, 0)]
    return [[round(float((value + 1e-40).log10() / 2), 3) for value in row] for row in parts]


def _medians(records: Sequence[Record], name: str) -> dict[str, Number]:
    """Of the query, of the value, and how far they are apart."""
    values = {block: [number(record.result["median"][block]) for record in records] for block in ("Q", "V")}
    gaps = [v - q for q, v in zip(values["Q"], values["V"], strict=True)]
    return {
        "Q": mean(f"{name} Q median", values["Q"]),
        "V": mean(f"{name} V median", values["V"]),
        "gap": mean(f"{name} gap", gaps),
    }


def _histogram(records: Sequence[Record], title: str) -> Panel:
    curves = []
    for colour, (block, name) in enumerate((("Q", "query"), ("V", "value"))):
        counts = torch.tensor([record.result["histogram"][block] for record in records], dtype=torch.float64)
        share = (counts.sum(0) / counts.sum()).tolist()
        curves.append(Curve(name, EDGES, share, colour=colour, style="steps"))
    return Panel(curves, (), title, r"$\log_{10}|H_{ij}|$", "share of the entries")


def report_1(records: Sequence[Record]) -> Report:
    """The heat map, the histogram and the medians, and how far these are apart at other sizes of the embeddings."""
    every, records = records, where(records, sigma=SIGMA)
    drawn = [record for record in records if "heat" in record.result]
    medians = _medians(records, "fig1")
    panels: list[Panel | Heat] = []
    if drawn:
        rows = drawn[0].result["heat"]
        size = CELLS
        matrix = [[v for block in rows[i] for v in block[r]] for i in range(len(BLOCKS)) for r in range(size)]
        panels.append(Heat(matrix, "one seed", r"$\log_{10}$ of the r.m.s. of $H_{ij}$", [f"$W_{b}$" for b in BLOCKS]))
    panels.append(_histogram(records, f"all {len(records)} seeds"))
    chart = Chart(
        "fig1",
        "Entries of the Hessian of one Transformer block at initialisation",
        f"Left: the blocks of the attention weights, d = {WIDTH}, embeddings of standard deviation {SIGMA}; a cell is "
        f"the root mean square of the entries in one of {CELLS} × {CELLS} equal parts of a block. Right: "
        f"histograms of the entries of the diagonal blocks; the medians are 10^{medians['Q'].value:.2f} (query) and "
        f"10^{medians['V'].value:.2f} (value).",
        panels,
    )
    return Report((chart,), (_apart(every, medians),), at_width(records, medians.values()))


def _apart(records: Sequence[Record], medians: Mapping[str, Number]) -> Finding:
    """At every size of the embeddings, how many orders of magnitude the medians are apart."""
    gaps = {sigma: _medians(where(records, sigma=sigma), "")["gap"] for sigma in SIGMAS}
    about = {sigma: between(gap, *ABOUT_TWO) for sigma, gap in gaps.items()}
    return judged_parts(
        "entries",
        f"Medians of log₁₀|entry| at σ = {SIGMA:g}, as in the figure: query {medians['Q'].value:.2f} ± "
        f"{medians['Q'].error:.2f}, value {medians['V'].value:.2f} ± {medians['V'].error:.2f}. Orders of magnitude by "
        "which the query's is smaller in a seed: "
        + ", ".join(f"{gap.value:.2f} ± {gap.error:.2f} (σ = {sigma:g})" for sigma, gap in gaps.items())
        + f". About two means {ABOUT_TWO[0]:g} to {ABOUT_TWO[1]:g}; below 0 the query's entries are larger."
        + undecided(all_of(about.values()), len(where(records, sigma=SIGMAS[0]))),
        {f"σ = {sigma:g}": holds for sigma, holds in about.items()},
    )


def report_4(records: Sequence[Record]) -> Report:
    """With softmax and without."""
    soft, linear = where(records, kind="softmax"), where(records, kind="linear")
    medians, without = _medians(soft, "fig1"), _medians(linear, "fig4")
    chart = Chart(
        "fig4",
        "Entries of the query and the value block, with softmax and without",
        f"Histograms of the absolute entries of the query and the value block, over all seeds; d = {WIDTH}, embeddings "
        f"of standard deviation {SIGMA}.",
        [_histogram(soft, "softmax attention"), _histogram(linear, "linear attention")],
    )
    gap = without["gap"]
    same = between(gap, -SAME, SAME)
    findings = (
        judged(
            "softmax-entries",
            f"Without softmax the medians of log₁₀|entry| are {gap.value:.3f} ± {gap.error:.3f} orders of magnitude "
            f"apart, with it {medians['gap'].value:.2f} ± {medians['gap'].error:.2f}; the same size is within "
            f"{SAME:g}." + undecided(same, len(linear)),
            holds=same,
        ),
        _shifts(soft, linear),
        _indefinite(soft, linear),
    )
    return Report((chart,), findings, at_width(records, (gap,)))


def _shifts(soft: Sequence[Record], linear: Sequence[Record]) -> Finding:
    """How far softmax moves the medians, seed by seed: the query's far, the value's hardly."""
    medians = [{record.config["seed"]: record.result["median"] for record in of} for of in (soft, linear)]
    both = sorted(set(medians[0]) & set(medians[1]))
    shift = {
        block: mean("", [number(medians[0][seed][block]) - number(medians[1][seed][block]) for seed in both])
        for block in ("Q", "V")
    }
    far, near = between(shift["Q"], -ORDER, ORDER), between(shift["V"], -SAME, SAME)
    changed = None if far is None else not far
    holds = all_of((changed, near))
    return judged(
        "softmax-query",
        "Softmax moves the median of log₁₀|entry| in a seed by "
        f"{shift['Q'].value:.2f} ± {shift['Q'].error:.2f} (query) and {shift['V'].value:.2f} ± "
        f"{shift['V'].error:.2f} (value). More than {ORDER:g} counts as a change, within {SAME:g} as none."
        + undecided(holds, len(both)),
        holds=holds,
    )


def _indefinite(soft: Sequence[Record], linear: Sequence[Record]) -> Finding:
    """Block by block: negative eigenvalues in every seed with softmax, in none without."""
    least = {block: min(number(record.result["negative"][block]) for record in soft) for block in BLOCKS}
    most = {block: max(number(record.result["negative"][block]) for record in linear) for block in BLOCKS}
    return judged_parts(
        "softmax-indefinite",
        "Share of ‖block‖² in negative eigenvalues: with softmax at least "
        + ", ".join(f"{share:.2g} ({block})" for block, share in least.items())
        + "; without at most "
        + ", ".join(f"{share:.2g} ({block})" for block, share in most.items())
        + f", over {seeds(len(soft))}.",
        {f"the block {block}": least[block] > 0 and most[block] == 0 for block in BLOCKS},
    )


FIG1 = Experiment(
    "fig1",
    "Entries of the Hessian of one block at initialisation",
    f"{PAPER}, Figure 1",
    points_1,
    measure,
    report_1,
)
FIG4 = Experiment(
    "fig4",
    "Entries of the Hessian with and without softmax",
    f"{PAPER}, Figure 4",
    points_4,
    measure,
    report_4,
    data="fig1",
)
