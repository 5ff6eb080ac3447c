"""The feed-forward part: hollow in its functional part with ReLU, and what GELU adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.data import Addition
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.full_block.matrices import matrices
from curvlens.experiments.learners import trained
from curvlens.experiments.sources import ARTICLE
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import mean, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel


def points(effort: Effort) -> list[Config]:
    """Trained blocks with ReLU and with GELU."""
    return [
        {"activation": activation, "steps": 50, "seed": seed}
        for activation in ("relu", "gelu")
        for seed in effort.repeats(2, 5)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """GGN and functional part of the feed-forward blocks of the top layer."""
    model = trained(
        Addition(digits=2), seed=config["seed"], steps=config["steps"], norm="none", activation=config["activation"]
    )
    H, G, places = matrices(model, 16)
    up, down = places["h.1.mlp.up.weight"], places["h.1.mlp.down.weight"]
    pairs = {"up": (up, up), "down": (down, down), "between": (up, down)}
    return {name: [float(G[a, b].norm()), float((H - G)[a, b].norm())] for name, (a, b) in pairs.items()}


def report(records: Sequence[Record]) -> Report:
    """Hollow on the diagonal; not beside it."""
    ratios: dict[tuple[str, str], float] = {}
    for activation in ("relu", "gelu"):
        of = where(records, activation=activation)
        for name in ("up", "down", "between"):
            ratios[activation, name] = mean("", [r.result[name][1] / r.result[name][0] for r in of]).value
    hollow = max(ratios["relu", "up"], ratios["relu", "down"])
    names = ("up", "down", "between")
    chart = Chart(
        "feedforward",
        "The feed-forward Hessian: hollow with ReLU, but not small",
        "Norm of the functional part over that of the Gauss–Newton part, for the weights of the top layer's "
        "feed-forward part, without norms behind.",
        [
            Panel(
                [
                    Curve(
                        activation,
                        [0, 1, 2],
                        [ratios[activation, n] for n in names],
                        colour=j,
                        style="bars",
                    )
                    for j, activation in enumerate(("relu", "gelu"))
                ],
                y_label=r"$\|H_f\| / \|GGN\|$",
                ticks=([0, 1, 2], ["(up, up)", "(down, down)", "(up, down)"]),
            )
        ],
        columns=1,
    )
    finding = Finding(
        "relu-simple",
        "holds when" if hollow < 1e-9 else "does not hold",
        f"With ReLU ‖H_f‖/‖GGN‖ of (up, up) and (down, down) is {hollow:.0e}, of (up, down) "
        f"{ratios['relu', 'between']:.2f}; with GELU of (up, up) {ratios['gelu', 'up']:.2f}.",
        "the diagonal blocks; between the two weights the functional part is there as well",
    )
    return Report((chart,), (finding,))


FEEDFORWARD = Experiment(
    "feedforward", "The feed-forward part with ReLU", f"{ARTICLE}, Section 5.4", points, measure, report
)
