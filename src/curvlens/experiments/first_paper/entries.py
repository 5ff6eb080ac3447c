"""Figures 1 and 4: how large the entries of the query and the value block are, with softmax and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.setting import Kind, block_hessian
from curvlens.experiments.sizes import negative_share, number
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import mean, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Heat, Panel

WIDTH, SIGMA = 16, 0.2
EDGES = tuple(-12 + 0.25 * i for i in range(45))
"""Of the histogram of log₁₀ |entry|, from −12 to −1."""
BLOCKS = ("Q", "K", "V")
CELLS = 24
"""Rows of a block in the heat map; a cell shows the root mean square of its entries."""


def _points(kind: Kind, effort: Effort) -> list[Config]:
    return [{"width": WIDTH, "sigma": SIGMA, "kind": kind, "seed": seed} for seed in effort.repeats(5, 20)]


def points_1(effort: Effort) -> list[Config]:
    """Softmax attention."""
    return _points("softmax", effort)


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
    """The heat map, the histogram and the medians."""
    drawn = [record for record in records if "heat" in record.result]
    medians = _medians(records, "fig1")
    panels: list[Panel | Heat] = []
    if drawn:
        rows = drawn[0].result["heat"]
        size = CELLS
        matrix = [[v for block in rows[i] for v in block[r]] for i in range(len(BLOCKS)) for r in range(size)]
        panels.append(Heat(matrix, "one seed", r"$\log_{10}$ of the r.m.s. of $H_{ij}$", [f"$W_{b}$" for b in BLOCKS]))
    panels.append(_histogram(records, f"all {len(records)} seeds"))
    gap = medians["gap"]
    chart = Chart(
        "fig1",
        "Entries of the Hessian of one Transformer block at initialisation",
        f"Left: the blocks of the attention weights, d = {WIDTH}, embeddings of standard deviation {SIGMA}. Right: "
        f"histograms of the entries of the diagonal blocks; the medians are 10^{medians['Q'].value:.2f} (query) and "
        f"10^{medians['V'].value:.2f} (value).",
        panels,
    )
    finding = Finding(
        "entries",
        "holds" if gap.value > 1.5 else "holds when" if gap.value > 0.5 else "does not hold",
        f"Medians of log₁₀|entry|: query {medians['Q'].value:.2f} ± {medians['Q'].error:.2f}, value "
        f"{medians['V'].value:.2f} ± {medians['V'].error:.2f}; {gap.value:.2f} ± {gap.error:.2f} orders of magnitude "
        "apart.",
    )
    return Report((chart,), (finding,), tuple(medians.values()))


def report_4(records: Sequence[Record]) -> Report:
    """With softmax and without."""
    soft, linear = where(records, kind="softmax"), where(records, kind="linear")
    medians, without = _medians(soft, "fig1"), _medians(linear, "fig4")
    chart = Chart(
        "fig4",
        "Softmax makes the blocks different, linear attention has them alike",
        "Histograms of the absolute entries of the query and the value block, over all seeds.",
        [_histogram(soft, "softmax attention"), _histogram(linear, "linear attention")],
    )
    shift = {block: abs(medians[block].value - without[block].value) for block in ("Q", "V")}
    negative = {
        kind: {b: max(record.result["negative"][b] for record in of) for b in BLOCKS}
        for kind, of in (("softmax", soft), ("linear", linear))
    }
    findings = (
        Finding(
            "softmax-entries",
            "holds" if abs(without["gap"].value) < 0.3 else "does not hold",
            f"Without softmax the medians are {without['gap'].value:.2f} ± {without['gap'].error:.2f} orders of "
            f"magnitude apart, with it {medians['gap'].value:.2f} ± {medians['gap'].error:.2f}.",
        ),
        Finding(
            "softmax-query",
            "holds" if shift["V"] < 0.3 and shift["Q"] > 3 * shift["V"] else "does not hold",
            f"Leaving softmax out moves the median of log₁₀|entry| by {shift['Q']:.2f} (query) and {shift['V']:.2f} "
            "(value).",
        ),
        Finding(
            "softmax-indefinite",
            "holds" if max(negative["linear"].values()) == 0 and negative["softmax"]["Q"] > 0 else "does not hold",
            "Largest share of ‖block‖² in negative eigenvalues: "
            + "; ".join(
                f"{kind}: " + ", ".join(f"{b} {share:.2g}" for b, share in shares.items())
                for kind, shares in negative.items()
            )
            + ("." if negative["softmax"]["V"] else ". The value block is positive semi-definite with softmax too."),
        ),
    )
    return Report((chart,), findings, (without["gap"],))


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
    "The same with and without softmax",
    f"{PAPER}, Figure 4",
    points_4,
    measure,
    report_4,
    data="fig1",
)
