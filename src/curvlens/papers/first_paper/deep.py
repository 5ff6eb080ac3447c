"""Figure 6: growth in every layer of deep Transformers without norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.data import Addition
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.first_paper import deep_findings
from curvlens.papers.first_paper.deep_blocks import layer_norms
from curvlens.papers.first_paper.depths import depths, layers, of_layer
from curvlens.papers.first_paper.growth import LIMIT, SMALL
from curvlens.papers.parts import PARTS, SIGNS
from curvlens.papers.setting import drawn
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import farthest, grid
from curvlens.report.charts import Chart, Panel, Slope
from curvlens.study import Config, Record

LETTERS = ("Q", "K", "V", "O")
FEW_LAYERS = 3
"""Up to which depth slopes for σ ≤ 0.1 are compared with the reference numbers, which are not of deeper networks."""


def points(effort: Effort) -> list[Config]:
    """One to five layers."""
    most, width, count, sequences = (3, 12, 7, 16) if effort.quick else (5, 32, 12, 64)
    return [
        {"depth": depth, "width": width, "sequences": sequences, "sigma": sigma, "seed": seed}
        for depth in range(most, 0, -1)  # the longest first
        for seed in effort.repeats(3, 5)
        for sigma in (*LIMIT, *grid(0.01, 10, count))
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of every layer's attention blocks."""
    width = config["width"]
    draw, scale, sigma = Draws(config["seed"]), 0.8 / math.sqrt(width), config["sigma"]
    task = Addition()
    ids, labels = task.batch(config["sequences"], seed=config["seed"])
    x = draw(task.vocab, width, scale=sigma)[ids] + draw(task.context, width, scale=sigma)
    unembed = draw(width, task.vocab, scale=scale)
    weights = [drawn(draw, width) for _ in range(config["depth"])]
    norms = layer_norms(x, labels, weights, unembed)
    top = len(norms) - 1
    return {
        "norms": {
            letter: [
                [
                    value if part == "functional" and layer == top and letter in "VO" else sized(value)
                    for part, value in zip(PARTS, found[letter], strict=True)
                ]
                for layer, found in enumerate(norms)
            ]
            for letter in LETTERS
        }
    }


def _panel(records: Sequence[Record], depth: int, letter: str, part: str, power: int) -> Panel:
    shown = range(1, depth + (part != "functional" or letter == "Q"))  # on top the value's functional part is zero
    curves = [of_layer(records, depth, letter, n, part).curve(f"layer {n}", colour=n - 1) for n in shown]
    slopes = [
        Slope(power, (first.x[0], 1.0), (first.x[0], first.y[0] / 10), rf"$\sigma^{power}$") for first in curves[:1]
    ]
    return Panel(
        curves,
        slopes,
        f"depth {depth}",
        r"$\sigma$",
        rf"$\|{SIGNS[part]}(W_{letter}, W_{letter})\|_F$",
        "log",
        "log",
        lines=(1.0,),
        note="" if curves else "exactly zero",
    )


def report(records: Sequence[Record]) -> Report:
    """Slopes of every layer."""
    config = records[0].config
    rows = (("V", "outer", 2), ("V", "functional", 3), ("Q", "outer", 6), ("Q", "functional", 5))
    chart = Chart(
        "fig6",
        "Every layer of a deep Transformer over the size of the embeddings",
        "Norms of the diagonal blocks of value (upper rows) and query (lower rows) in every layer of Transformers "
        f"without norms, d = {config['width']}, over {config['sequences']} sequences; layer 1 is next to the "
        "embeddings. Dashed grey: the powers of a single layer (3 for the value's functional part below the top, "
        "which a single layer does not have), drawn a little below. Beyond σ = 1 attention saturates in some seeds and "
        "not in others: their norms are decades apart, and so are the ends of the bands.",
        [_panel(records, depth, *row) for row in rows for depth in depths(records)],
        columns=len(depths(records)),
    )
    numbers: list[Number] = []
    for letter, part, power in rows:
        hollow = (letter, part) == ("V", "functional")
        name = f"fig6 {letter} {part} small" + (" below the top" if hollow else "")
        few = [(depth, layer) for depth, layer in _below(records, hollow) if depth <= FEW_LAYERS]
        lines = [line for place in few if (line := of_layer(records, place[0], letter, place[1], part)).fits]
        numbers += [farthest([line.slope(name, SMALL) for line in lines], power)] if lines else []
    laws = tuple(
        line.fitted(f"depth {depth}, layer {layer}: {SIGNS[part]}({letter}, {letter})", power)
        for letter, part, power in rows
        for depth, layer in _below(records, (letter, part) == ("V", "functional"))
        if (line := of_layer(records, depth, letter, layer, part)).fits
    )
    return Report((chart,), deep_findings.findings(records), tuple(numbers), laws, marked(records))


def _below(records: Sequence[Record], hollow: bool) -> list[tuple[int, int]]:
    """Depths and layers, without the top layers if a part is zero there."""
    return [(depth, layer) for depth, layer in layers(records) if layer < depth or not hollow]


FIG6 = Experiment(
    "fig6",
    "Every layer of deep Transformers",
    f"{PAPER}, Figure 6",
    points,
    measure,
    report,
)
