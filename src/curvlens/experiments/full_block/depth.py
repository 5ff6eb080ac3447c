"""Curvature along depth at initialisation, with norms before, behind or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.full_block.matrices import matrices, rows
from curvlens.experiments.learners import trained
from curvlens.experiments.sources import ARTICLE, SECOND
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, sweep, where
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Curve, Panel

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
    along, texts, factors, sizes = [], [], {}, {}
    for colour, (norm, name) in enumerate(NORMS.items()):
        of = where(records, norm=norm)
        line = sweep(of, "layers", "whole", 0)
        growing.append(line.curve(name, colour=colour))
        middle = line.middle()
        factors[norm], sizes[norm] = float(middle[-1] / middle[0]), float(middle[-1])
        texts.append(f"{name} {float(middle[0]):.3g} → {float(middle[-1]):.3g}")
        deep = where(of, layers=deepest)
        panel = []
        for part, label in enumerate(("$H$", "GGN", "functional")):
            values = torch.tensor([[layer[part] for layer in record.result["layers"]] for record in deep])
            line = Sweep(tuple(range(1, deepest + 1)), values.double())
            panel.append(line.curve(label, colour=part))
        along.append(
            Panel(
                panel, (), f"{name}, {deepest} layers", "layer", "norm of its block", y_scale="log", ticks=_ticks(every)
            )
        )
    chart = Chart(
        "depth",
        "Curvature along depth at initialisation",
        "GPTs that are to add numbers of two digits. First panel: the norm of the whole Hessian over the number of "
        "layers. Others: the norm of each layer's diagonal block, for H, GGN and functional part.",
        [Panel(growing, (), "whole Hessian", "layers", r"$\|H\|_F$", y_scale="log", ticks=_ticks(depths)), *along],
    )
    grows = [NORMS[norm] for norm, factor in factors.items() if factor > 1.1]
    slowest = min(factors, key=lambda norm: factors[norm])
    largest = max(sizes, key=lambda norm: sizes[norm])
    cured = slowest == "pre" and largest != "pre"
    verdict: Verdict = "holds" if len(grows) == 3 and cured else "holds when" if grows else "does not hold"
    finding = Finding(
        "depth-growth",
        verdict,
        f"‖H‖ from 1 to {deepest} layers at initialisation: {'; '.join(texts)}.",
        f"it grows with {', '.join(grows)}, slowest with {NORMS[slowest]}; at the largest depth it is largest with "
        f"{NORMS[largest]}"
        if verdict == "holds when"
        else "",
    )
    return Report((chart,), (finding,))


def _ticks(numbers: Sequence[int]) -> tuple[list[float], list[str]]:
    return [float(number) for number in numbers], [str(number) for number in numbers]


DEPTH = Experiment("depth", "Curvature along depth", f"{SECOND}; {ARTICLE}, Section 5", points, measure, report)
