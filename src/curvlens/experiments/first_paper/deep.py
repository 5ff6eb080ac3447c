"""Figure 6: growth in every layer of deep Transformers without norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.first_paper.deep_blocks import layer_norms
from curvlens.experiments.first_paper.depths import of_layer
from curvlens.experiments.first_paper.growth import LARGE, SMALL
from curvlens.experiments.parts import PARTS, SIGNS
from curvlens.experiments.setting import drawn
from curvlens.experiments.sizes import marked, sized
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Panel, Slope

LETTERS = ("Q", "K", "V", "O")


def points(effort: Effort) -> list[Config]:
    """One to five layers."""
    depths, width, count, sequences = ((1, 2, 3), 12, 7, 16) if effort.quick else ((1, 2, 3, 4, 5), 32, 12, 64)
    return [
        {"depth": depth, "width": width, "sequences": sequences, "sigma": sigma, "seed": seed}
        for depth in reversed(depths)  # the longest first
        for seed in effort.repeats(3, 5)
        for sigma in grid(0.01, 10, count)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of every layer's attention blocks."""
    width = config["width"]
    draw, scale, sigma = Draws(config["seed"]), 0.8 / math.sqrt(width), config["sigma"]
    task = Addition()
    ids, labels = task.batch(config["sequences"], seed=config["seed"])
    x = draw(task.vocab, width, scale=sigma)[ids] + draw(task.context, width, scale=sigma)
    unembed = draw(width, task.vocab, scale=scale)
    layers = [drawn(draw, width) for _ in range(config["depth"])]
    norms = layer_norms(x, labels, layers, unembed)
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


def _depths(records: Sequence[Record]) -> list[int]:
    return sorted({record.config["depth"] for record in records})


def _panel(records: Sequence[Record], depth: int, letter: str, part: str, power: int) -> Panel:
    curves = []
    layers = range(1, depth + (part != "functional" or letter == "Q"))  # on top the value's functional part is zero
    for layer in layers:
        curves.append(of_layer(records, depth, letter, layer, part).curve(f"layer {layer}", colour=layer - 1))
    slopes = []
    if curves:
        first = curves[0]
        slopes = [Slope(power, (first.x[0], 1.0), (first.x[0], first.y[0] / 10), rf"$\sigma^{power}$")]
    return Panel(
        curves,
        slopes,
        f"depth {depth}",
        r"$\sigma$",
        rf"$\|{SIGNS[part]}(W_{letter}, W_{letter})\|_F$",
        "log",
        "log",
        lines=(1.0,),
    )


def report(records: Sequence[Record]) -> Report:
    """Slopes of every layer."""
    depths = _depths(records)
    rows = (("V", "outer", 2), ("V", "functional", 3), ("Q", "outer", 6), ("Q", "functional", 5))
    chart = Chart(
        "fig6",
        "Every layer of a deep Transformer: powers of a single layer for small embeddings, higher ones beyond",
        "Norms of the diagonal blocks of value (upper rows) and query (lower rows) in every layer of Transformers "
        "without norms; layer 1 is next to the embeddings. Dashed grey: the powers of a single layer (3 for the "
        "value's functional part below the top, which a single layer does not have), drawn a little below.",
        [
            _panel(records, depth, *row)
            for row in rows
            for depth in depths
            if row[:2] != ("V", "functional") or depth > 1
        ],
        columns=len(depths),
    )
    predicted = {("V", "outer"): 2, ("Q", "outer"): 6, ("Q", "functional"): 5}
    every = [(depth, layer) for depth in depths for layer in range(1, depth + 1)]
    worst = dict.fromkeys((SMALL, (0.1, 1.0), LARGE), 0.0)
    spread: dict[str, list[float]] = {}
    for (letter, part), power in predicted.items():
        for depth, layer in every:
            line = of_layer(records, depth, letter, layer, part)
            for window in worst:
                worst[window] = max(worst[window], abs(line.law(window).slope - power))
            spread.setdefault(f"{letter} {part}", []).append(line.law(SMALL).slope)
    value = [of_layer(records, d, "V", n, "functional").law(SMALL).slope for d, n in every if n < d]
    numbers = [_farthest(f"fig6 {name} small", slopes, predicted[_pair(name)]) for name, slopes in spread.items()]
    numbers.append(_farthest("fig6 V functional small below the top", value, 3))
    findings = (
        Finding(
            "deep-same",
            "holds when" if worst[SMALL] < 0.05 else "does not hold",
            f"Over all depths and layers the slopes of H_o(V), H_o(Q) and H_f(Q) differ from 2, 6 and 5 by at most "
            f"{worst[SMALL]:.3f} for σ ≤ 0.1, but by {worst[0.1, 1.0]:.2f} for σ from 0.1 to 1.",
            "σ ≲ 0.1, not all of (0, 1)",
        ),
        _lower(records),
        _beyond(records, worst[LARGE]),
        _top(records, predicted),
        Finding(
            "deep-value-functional",
            "holds" if value and min(value) > 0 else "does not hold",
            f"Below the top it grows with σ^{min(value):.3f} to σ^{max(value):.3f} for σ ≤ 0.1, one power more than "
            "H_o."
            if value
            else "",
        ),
    )
    laws = tuple(
        of_layer(records, depth, letter, layer, part).fitted(
            f"depth {depth}, layer {layer}: {SIGNS[part]}({letter}, {letter})", power
        )
        for letter, part, power in rows
        for depth, layer in every
        if (letter, part) != ("V", "functional") or layer < depth
    )
    return Report((chart,), findings, tuple(numbers), laws, marked(records))


def _pair(name: str) -> tuple[str, str]:
    letter, part = name.split()
    return letter, part


def _farthest(name: str, slopes: Sequence[float], power: float) -> Number:
    return Number(name, max(slopes, key=lambda slope: abs(slope - power)), 0.0)


def _lower(records: Sequence[Record]) -> Finding:
    """Whether each layer's block is smaller than the next one's, at all σ < 1."""
    counts = {"outer": [0, 0], "functional": [0, 0]}
    for depth in _depths(records):
        for layer in range(1, depth):
            for letter, part in (("V", "outer"), ("Q", "outer"), ("Q", "functional")):
                one, next_ = (of_layer(records, depth, letter, n, part).within(0, 1) for n in (layer, layer + 1))
                counts[part][0] += int((one.values < next_.values).sum())
                counts[part][1] += one.values.numel()
    shares = {part: smaller / max(1, total) for part, (smaller, total) in counts.items()}
    true = [f"the {part} part" for part, share in shares.items() if share > 0.95]
    verdict: Verdict = "holds" if len(true) == 2 else "holds when" if true else "does not hold"
    return Finding(
        "deep-lower",
        verdict,
        "Of all pairs of neighbouring layers at σ ≤ 1 the earlier one has the smaller block in "
        f"{shares['outer']:.0%} (outer) and {shares['functional']:.0%} (functional) of the cases.",
        " and ".join(true) if verdict == "holds when" else "",
    )


def _beyond(records: Sequence[Record], apart: float) -> Finding:
    """Powers beyond σ = 1."""
    texts = []
    steepest = {}
    for depth in _depths(records):
        slopes = [of_layer(records, depth, "V", n, "outer").law(LARGE).slope for n in range(1, depth + 1)]
        steepest[depth] = max(slopes)
        texts.append(f"{max(slopes):.2f} at depth {depth}")
    deep = max(steepest)
    rising = deep > 1 and steepest[deep] > steepest[min(steepest)] + 0.2
    return Finding(
        "deep-beyond",
        "holds" if rising else "does not hold",
        f"Steepest slope of H_o(V) over the layers for σ from 1 to 10: {', '.join(texts)}; the slopes of a single "
        f"layer are missed by up to {apart:.1f}.",
    )


def _top(records: Sequence[Record], predicted: Mapping[tuple[str, str], int]) -> Finding:
    """The top layer beyond σ = 1."""
    texts, worst = [], 0.0
    for (letter, part), power in predicted.items():
        slopes = [of_layer(records, depth, letter, depth, part).law(LARGE).slope for depth in _depths(records)]
        worst = max(worst, *(abs(slope - power) for slope in slopes))
        texts.append(f"{SIGNS[part]}({letter}) {min(slopes):.2f} to {max(slopes):.2f} ({power})")
    return Finding(
        "deep-top",
        "holds" if worst < 0.2 else "does not hold",
        f"Slopes of the top layer for σ from 1 to 10 over all depths (predicted): {', '.join(texts)}.",
    )


FIG6 = Experiment(
    "fig6",
    "Every layer of deep Transformers",
    f"{PAPER}, Figure 6",
    points,
    measure,
    report,
)
