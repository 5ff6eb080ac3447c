"""Curvature along depth at initialisation, with norms before, behind or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.papers.comparisons import ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices, rows
from curvlens.papers.learners import trained
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE, SECOND
from curvlens.papers.sweeps import Sweep, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

NORMS = {"pre": "Pre-LN", "post": "Post-LN", "none": "no norm"}


def points(effort: Effort) -> list[Config]:
    """GPTs of one to six layers at initialisation."""
    depths = (1, 2, 3) if effort.quick else (1, 2, 3, 4, 6)
    return [
        {"norm": norm, "layers": layers, "seed": seed}
        for layers in reversed(depths)
        for norm in NORMS
        for seed in effort.repeats(2, 5)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of the whole and of every layer's block, of H, GGN and the functional part."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=0, n_layer=config["layers"], norm=config["norm"])
    H, G, places = matrices(model, 16)
    parts = (H, G, H - G)
    layers = []
    for number in range(config["layers"]):
        of = rows(places, f"h.{number}.")
        layers.append([float(part[of][:, of].norm()) for part in parts])
    return {
        "whole": [float(part.norm()) for part in parts],
        "top": float(torch.linalg.eigvalsh(H)[-1]),
        "layers": layers,
    }


def report(records: Sequence[Record]) -> Report:
    """Growth with the number of layers, and along them."""
    depths = sorted({record.config["layers"] for record in records})
    deepest = depths[-1]
    every = list(range(1, deepest + 1))
    growing: list[Curve] = []
    along, lines = [], {}
    for colour, (norm, name) in enumerate(NORMS.items()):
        of = where(records, norm=norm)
        lines[norm] = sweep(of, "layers", "whole", 0)
        growing.append(lines[norm].curve(name, colour=colour))
        deep = where(of, layers=deepest)
        panel = []
        for part, label in enumerate(("$H$", "GGN", "functional")):
            values = [[layer[part] for layer in record.result["layers"]] for record in deep]
            found = Sweep(tuple(every), torch.tensor(values, dtype=torch.float64))
            panel.append(found.curve(label, colour=part))
        along.append(
            Panel(
                panel,
                (),
                f"{name}, {deepest} layers",
                "layer",
                r"$\|\cdot\|_F$ of its block",
                y_scale="log",
                ticks=_ticks(every),
            )
        )
    chart = Chart(
        "depth",
        "Curvature along depth at initialisation",
        "GPTs that are to add numbers of two digits. First panel: the norm of the whole Hessian over the number of "
        "layers. Others: the Frobenius norm of each layer's diagonal block, for H, GGN and functional part.",
        [Panel(growing, (), "whole Hessian", "layers", r"$\|H\|_F$", y_scale="log", ticks=_ticks(depths)), *along],
    )
    return Report((chart,), (_growth(lines),), notes=marked(records, "layers", "depths"))


def _growth(lines: Mapping[str, Sweep]) -> Finding:
    """From one layer to the most, in pairs of one seed: whether it grows, and whether with Pre-LN it grows less."""
    depths = lines["pre"].x
    factors = {norm: line.values[:, -1] / line.values[:, 0] for norm, line in lines.items()}
    growth = {norm: ratio(line.values[:, -1], line.values[:, 0]) for norm, line in lines.items()}
    less = {norm: ratio(factors["pre"], factors[norm]) for norm in ("post", "none")}
    last = {norm: line.values[:, -1] for norm, line in lines.items()}
    beside = {
        norm: [ratio(a, b) for a, b in zip(lines["pre"].values.T, lines[norm].values.T, strict=True)] for norm in less
    }
    sizes = "; ".join(
        f"{NORMS[norm]} {float(line.middle()[-1]):.3g} ({float(last[norm].min()):.3g} to {float(last[norm].max()):.3g} "
        "over the seeds)"
        for norm, line in lines.items()
    )
    text = (
        f"‖H‖ at initialisation, {depths[-1]:g} layers over {depths[0]:g}, geometric means over the seeds with their "
        f"95 % intervals: {'; '.join(f'{NORMS[norm]} {found}' for norm, found in growth.items())}. The factor with "
        f"Pre-LN over that with {'; with '.join(f'{NORMS[norm]} {found}' for norm, found in less.items())}. ‖H‖ "
        f"itself at {depths[-1]:g} layers: {sizes}. Pre-LN over another norm at "
        f"{', '.join(f'{depth:g}' for depth in depths)} layers: "
        f"{'; '.join(f'{NORMS[norm]} ' + ', '.join(map(str, found)) for norm, found in beside.items())}."
    )
    grows = {f"growth with {NORMS[norm]}": growth[norm].above() for norm in less}
    if True not in grows.values():  # then there is nothing that a remedy could be for
        return judged_parts("depth-growth", text, grows)
    if growth["pre"].above():  # a remedy may leave some growth, or none
        grows["growth with Pre-LN"] = True
    slower = {f"slower growth with Pre-LN than with {NORMS[norm]}": found.below() for norm, found in less.items()}
    finding = judged_parts("depth-growth", f"{text} A remedy makes it grow more slowly.", grows | slower)
    if True in slower.values():
        return finding
    told = "is undecided with these seeds" if None in slower.values() else "does not hold"
    above = {each.above() for found in beside.values() for each in found}
    larger = " (at equal depth its norm is larger wherever this is decided)" if above <= {True, None} else ""
    return replace(finding, regime=f"{finding.regime}; that Pre-LN is the remedy {told}{larger}")


def _ticks(numbers: Sequence[int]) -> tuple[list[float], list[str]]:
    return [float(number) for number in numbers], [str(number) for number in numbers]


DEPTH = Experiment("depth", "Curvature along depth", f"{SECOND}; {ARTICLE}, Section 5", points, measure, report)
