"""Section 3.2: attention over few tokens or many, with the same tokens, weights and temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.calculus import attention
from curvlens.papers.comparisons import between, seeds
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.layer import BLOCKS, LENGTH, WIDTH
from curvlens.papers.parts import SPLIT
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import mean, sweep, where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Standard deviations of the tokens: the query-key blocks hold more of them than the value block."""
QUERIES = 0.7
"""The size of queries and keys: scores of 0.5, with which attention over all tokens is nearly even."""
HALF = 0.5
"""The share of the squared norm beyond which some blocks dominate."""
FEW = 1
"""The place of attention over few tokens: two of them at full size, since over one these blocks are zero."""


def points(effort: Effort) -> list[Config]:
    """Every query sees one random token, or more, up to all."""
    return [
        {"seen": seen, "size": size, "seed": seed}
        for size in SIZES
        for seen in ((1, 3, LENGTH) if effort.quick else (1, 2, 3, 4, 6, 9, LENGTH))
        for seed in effort.repeats(5, 100)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The share of the outer query-key blocks in ‖H_o‖² + ‖H_f‖², and the entropy of attention over its largest value.

    Queries and keys have the same size for tokens of any size, so that attention is the same.
    """
    draw = Draws(config["seed"])
    x, y = config["size"] * draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    q, k = (draw(WIDTH, WIDTH, scale=QUERIES / math.sqrt(WIDTH) / config["size"]) for _ in range(2))
    v = draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH))
    mask = draw(LENGTH, LENGTH).argsort(-1).argsort(-1) < config["seen"]  # the first tokens of a random order
    H = attention.hessian(x, q, k, v, target=y, mask=mask)
    squares = {
        (block, part): (2 if block[0] != block[1] else 1) * H.norm((block[0], block[1]), part) ** 2
        for block in BLOCKS
        for part in SPLIT
    }
    scores = (x @ q @ k.mT @ x.mT / math.sqrt(WIDTH)).masked_fill(~mask, -math.inf)
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * torch.where(mask, logs, 0.0)).sum(-1).mean() / math.log(LENGTH)
    inner = sum(squares[block, "outer"] for block in ("QQ", "KK", "QK"))
    return {"share": inner / sum(squares.values()), "entropy": float(entropy)}


def report(records: Sequence[Record]) -> Report:
    """The share over the number of tokens that are seen."""
    curves, texts = [], []
    parts: dict[str, bool | None] = {}
    for colour, size in enumerate(SIZES):
        of = where(records, size=size)
        share, entropy = sweep(of, "seen", "share"), sweep(of, "seen", "entropy")
        curves.append(share.curve(rf"tokens of size {size:g}", shares=True, colour=colour))
        most = mean("", share.values[:, -1].tolist())
        few = mean("", share.values[:, FEW].tolist())
        rise = mean("", (share.values[:, -1] - share.values[:, FEW]).tolist())
        spread, rises = between(most, HALF, math.inf), between(rise, 0.0, math.inf)
        case = f"from {few.value:.0%} over {share.x[FEW]:g} to {most.value:.0%} over {share.x[-1]:g}"
        parts[f"tokens of size {size:g}, {case}"] = all_of((spread, rises))
        texts.append(
            f"tokens of size {size:g}: "
            + ", ".join(
                f"{value:.0%} over {seen:g} (entropy {level:.2f})"
                for seen, value, level in zip(
                    share.x, share.values.mean(0).tolist(), entropy.values.mean(0).tolist(), strict=True
                )
            )
            + f", the last ± {most.error:.0%}"
            + (f", which {seeds(len(share.values))} cannot tell from {HALF:.0%}" if spread is None else "")
            + f"; from {share.x[FEW]:g} tokens (± {few.error:.0%}) to {share.x[-1]:g} it moves by "
            f"{100 * rise.value:+.0f} ± {100 * rise.error:.0f} points"
        )
    chart = Chart(
        "dispersion",
        "The outer query-key blocks when attention is spread",
        f"One layer with {LENGTH} Gaussian tokens, of which every query sees so many: the share of the blocks (Q, Q), "
        "(K, K) and (Q, K) of the outer part in ‖H_o‖² + ‖H_f‖², mean over the seeds.",
        [Panel(curves, (), "", "tokens that a query sees", "share", y_lines=(HALF,))],
        columns=1,
    )
    return Report((chart,), (_dispersed(parts, texts),))


def _dispersed(parts: Mapping[str, bool | None], texts: Sequence[str]) -> Finding:
    return judged_parts(
        "dispersed",
        "Share of the outer query-key blocks in ‖H_o‖² + ‖H_f‖² with attention over 1 to all tokens; "
        + "; ".join(texts)
        + f". Spread makes them dominate if they have more than {HALF:.0%} with attention over all, and less in a seed "
        "with attention over few: what they have there already comes from the size of the tokens. Entropies are parts "
        f"of log {LENGTH}, that of attention which is even.",
        parts,
    )


DISPERSION = Experiment(
    "dispersion",
    "Attention over few tokens or many",
    f"{PAPER}, Section 3.2",
    points,
    measure,
    report,
)
