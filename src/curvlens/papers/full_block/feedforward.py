"""The feed-forward part: hollow in its functional part with ReLU, and what GELU adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.data import Addition
from curvlens.papers.comparisons import ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices
from curvlens.papers.learners import trained
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import bars, mean, where
from curvlens.papers.verdicts import Finding, judged
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

BLOCKS = {"up": "(up, up)", "down": "(down, down)", "between": "(up, down)"}
HOLLOW = 1e-9
"""Below this share of the Gauss–Newton part a functional part is zero but for rounding."""
SIMPLE = 0.1
"""Below this share the Gauss–Newton part alone is nearly the whole Hessian."""


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
    """The functional part beside the Gauss–Newton part, in the three blocks."""
    chart = Chart(
        "feedforward",
        "The feed-forward Hessian: its functional part, with ReLU and with GELU",
        "Norm of the functional part over that of the Gauss–Newton part, for the weights of the top layer's "
        "feed-forward part, without norms behind: arithmetic mean over the seeds with its 95 % interval. With ReLU it "
        "is zero in (up, up) and (down, down).",
        [
            Panel(
                [
                    bars(activation, [mean("", _shares(records, activation, block).tolist()) for block in BLOCKS], j)
                    for j, activation in enumerate(("relu", "gelu"))
                ],
                y_label=r"$\|H_f\| / \|GGN\|$",
                ticks=([0, 1, 2], list(BLOCKS.values())),
            )
        ],
        columns=1,
    )
    return Report((chart,), (_simple(records),))


def _shares(records: Sequence[Record], activation: str, block: str) -> Tensor:
    """‖H_f‖/‖GGN‖ of a block, one a seed."""
    pairs = [record.result[block] for record in where(records, activation=activation)]
    return torch.tensor([functional / ggn for ggn, functional in pairs], dtype=torch.float64)


def _simple(records: Sequence[Record]) -> Finding:
    """Hollow on the diagonal, not so with GELU; and how much lies beside the diagonal."""
    largest = {block: float(_shares(records, "relu", block).max()) for block in ("up", "down")}
    smooth = float(_shares(records, "gelu", "up").min())
    hollow = max(largest.values()) < HOLLOW < smooth
    beside = _shares(records, "relu", "between")
    between = ratio(beside, torch.ones_like(beside))
    simple = between.below(SIMPLE)
    text = (
        "‖H_f‖/‖GGN‖ with ReLU: "
        + ", ".join(f"{BLOCKS[block]} at most {share:.1g}" for block, share in largest.items())
        + f", {BLOCKS['between']} {between.value:.2g} ({between.low:.2g} to {between.high:.2g}); with GELU "
        f"{BLOCKS['up']} at least {smooth:.2g}. Below {HOLLOW:g} counts as zero. A Hessian is simple if its "
        f"functional part is zero on the diagonal, unlike with GELU, and below {SIMPLE:g} of the Gauss–Newton part "
        "elsewhere."
    )
    when = f"the diagonal blocks {BLOCKS['up']} and {BLOCKS['down']}, not {BLOCKS['between']}" if hollow else ""
    return judged("relu-simple", text, holds=hollow and simple, when=when if simple is False else "")


FEEDFORWARD = Experiment(
    "feedforward", "The feed-forward part with ReLU", f"{ARTICLE}, Section 5.4", points, measure, report
)
