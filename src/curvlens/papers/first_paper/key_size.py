"""Sections 2 and 3.2: what the size d_K of the keys does to the blocks, and to attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention
from curvlens.papers.comparisons import between
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import LENGTH, curves, norms
from curvlens.papers.sizes import marked, negative_share, number
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, mean, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

WIDTH = 16
VARIANCES = ("1/d", "1/d_K")
"""Of the query and key weights: as in the papers' experiments, and one that falls with the keys."""
EVEN = 0.99
"""The entropy, over its largest value, from which on attention is nearly even."""


def points(effort: Effort) -> list[Config]:
    """Keys of 1 to 128 dimensions for tokens of 16; query and key weights of variance 1/d, or 1/d_K."""
    return [
        {"d_k": d_k, "variance": variance, "seed": seed}
        for variance in VARIANCES
        for seed in effort.repeats(3, 10)
        for d_k in ((1, 16, 128) if effort.quick else (1, 2, 4, 8, 16, 32, 64, 128))
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks, the share of negative eigenvalues on the diagonal, and the entropy of attention."""
    draw, d_k = Draws(config["seed"]), config["d_k"]
    x, y = draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    wq, wk = (draw(WIDTH, d_k, scale=(WIDTH if config["variance"] == "1/d" else d_k) ** -0.5) for _ in range(2))
    H = attention.hessian(x, wq, wk, draw(WIDTH, WIDTH, scale=WIDTH**-0.5), target=y)
    logs = (x @ wq @ wk.mT @ x.mT / math.sqrt(d_k)).log_softmax(-1)
    return {
        "norms": norms(H),
        "negative": {letter: negative_share(H.total[letter]) for letter in "QKV"},
        "entropy": float(-(logs.exp() * logs).sum(-1).mean() / math.log(LENGTH)),
    }


def report(records: Sequence[Record]) -> Report:
    """What the size of the keys does."""
    of = where(records, variance="1/d")
    chosen = (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VQ", "outer"), ("VV", "outer"))
    negative = [sweep(of, "d_k", "negative", letter) for letter in "QK"]
    entropies = {v: sweep(where(records, variance=v), "d_k", "entropy") for v in VARIANCES}
    ticks = (list(negative[0].x), [f"{x:g}" for x in negative[0].x])
    value = max(number(record.result["negative"]["V"]) for record in records)
    chart = Chart(
        "key-size",
        "The blocks over the size of the keys",
        f"One layer with {LENGTH} Gaussian tokens of {WIDTH} dimensions; the scores are divided by the root of d_K. "
        "Left and middle: query and key weights of variance 1/d; middle: the share of ‖block‖² in negative "
        f"eigenvalues, which is at most {value:.1g} in the value block. Right: the entropy of attention, also with "
        "weights of variance 1/d_K.",
        [
            Panel(
                curves(of, "d_k", chosen),
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
            Panel(
                [
                    found.curve(f"variance ${variance}$", shares=True, colour=i)
                    for i, (variance, found) in enumerate(entropies.items())
                ],
                (),
                "entropy of attention",
                "$d_K$",
                "entropy / log L",
                "log",
                ticks=ticks,
            ),
        ],
        columns=3,
    )
    return Report((chart,), (_even(entropies),), notes=marked(records, "d_k", "d_K"))


def _even(entropies: Mapping[str, Sweep]) -> Finding:
    """Whether attention is even with the largest keys, where their weights do not depend on d_K and where they do."""
    parts: dict[str, bool | None] = {}
    texts = []
    for variance, found in entropies.items():
        last = mean("", found.values[:, -1].tolist())
        parts[f"weights of variance {variance}"] = between(last, EVEN, math.inf)
        levels = ", ".join(f"{level:.3f}" for level in found.values.mean(0).tolist())
        texts.append(f"weights of variance {variance}: {levels}, the last ± {last.error:.3f}")
    sizes = ", ".join(f"{x:g}" for x in next(iter(entropies.values())).x)
    return judged_parts(
        "even-at-start",
        f"Entropy of attention over its largest value, d_K = {sizes}: {'; '.join(texts)}. Even means at least "
        f"{EVEN:g}.",
        parts,
    )


KEY_SIZE = Experiment(
    "key-size", "The size of the keys", f"{PAPER}, Sections 2 and 3.2", points, measure, report, revision=2
)
