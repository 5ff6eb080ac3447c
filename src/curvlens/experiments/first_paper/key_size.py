"""Section 2: what the size d_K of the keys does to the blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper.layer import LENGTH, curves, norms
from curvlens.experiments.sizes import negative_share
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import sweep
from curvlens.figures.charts import Chart, Panel


def points(effort: Effort) -> list[Config]:
    """Keys of 1 to 64 dimensions for tokens of 16."""
    return [
        {"d_k": d_k, "seed": seed}
        for seed in effort.repeats(3, 10)
        for d_k in ((1, 4, 16) if effort.quick else (1, 2, 4, 8, 16, 32, 64))
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks, and the share of negative eigenvalues in those on the diagonal."""
    draw, width = Draws(config["seed"]), 16
    x, y = draw(LENGTH, width), draw(LENGTH, width)
    wq, wk = (draw(width, config["d_k"], scale=1 / math.sqrt(width)) for _ in range(2))
    H = attention.hessian(x, wq, wk, draw(width, width, scale=1 / math.sqrt(width)), target=y)
    return {
        "norms": norms(H),
        "negative": {letter: negative_share(H.total[letter]) for letter in "QKV"},
    }


def report(records: Sequence[Record]) -> Report:
    """What the size of the keys does."""
    chosen = (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VQ", "outer"), ("VV", "outer"))
    negative = [sweep(records, "d_k", "negative", letter) for letter in "QK"]
    ticks = (list(negative[0].x), [f"{x:g}" for x in negative[0].x])
    chart = Chart(
        "key-size",
        "The blocks over the size of the keys",
        "One layer with Gaussian tokens of 16 dimensions and weights of unit scale; the scores are divided by the "
        "root of d_K. Right: the share of ‖block‖² in negative eigenvalues; the value block has none.",
        [
            Panel(
                curves(records, "d_k", chosen),
                (),
                "norms",
                "$d_K$",
                "Frobenius norm",
                "log",
                "log",
                ticks=ticks,
            ),
            Panel(
                [
                    found.curve(letter, shares=True, colour=i)
                    for i, (letter, found) in enumerate(zip("QK", negative, strict=True))
                ],
                (),
                "negative eigenvalues",
                "$d_K$",
                "share",
                "log",
                ticks=ticks,
            ),
        ],
    )
    return Report((chart,))


KEY_SIZE = Experiment("key-size", "The size of the keys", f"{PAPER}, Section 2", points, measure, report)
