"""Figure 3b: growth with Pre-LN, one line through all σ and local slopes, and below the root of the norms' ε."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from curvlens.papers.comparisons import between
from curvlens.papers.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.papers.first_paper import growth
from curvlens.papers.ranges import LOCAL, extent, following
from curvlens.papers.setting import EPS
from curvlens.papers.sizes import marked
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep
from curvlens.papers.verdicts import Finding, all_of, judged
from curvlens.report.charts import Chart, Curve, Panel, Slope
from curvlens.study import Config, Record

MUCH_LESS = 3.0
"""A difference of growth rates is much smaller than another if it is at most one part in so many."""
BELOW = (1e-5, 1e-5 * math.sqrt(10), 1e-4, 1e-4 * math.sqrt(10), 1e-3, 1e-3 * math.sqrt(10))
"""σ up to √ε, where the first norm divides by √ε and not by the size of a token any more."""
LIMIT = (BELOW[0], 1e-4)
"""Where the first norm is a linear map but for a part in a thousand. What attention adds is larger than the tokens by
1/√ε, so that the norms behind it still normalise."""


def points(effort: Effort) -> list[Config]:
    """Those of Figure 3a, with Pre-LN; and below √ε, with fewer seeds and without the blocks off the diagonal."""
    whole = growth.points("pre", effort, growth.sigmas(effort))
    below = [
        {"width": whole[0]["width"], "norm": "pre", "sigma": float(f"{sigma:.6g}"), "seed": seed, "pairs": False}
        for seed in effort.repeats(3, 5)
        for sigma in BELOW
    ]
    return [*whole, *below]


def report(records: Sequence[Record]) -> Report:
    """The difference of the growth rates of query and value."""
    below = _below(records)
    records = [record for record in records if record.config["sigma"] >= growth.WHOLE[0]]
    chart = Chart(
        "fig3b",
        "Pre-LN: the query and value blocks over the size of the embeddings",
        "As Figure 3a, with norms before attention, before the MLP and before the unembedding. Grey: one line "
        "through all σ from 0.01, as in the paper. Below, the local slopes. Left of 0.01, with fewer seeds, is what "
        f"the paper does not show: the left one of the vertical lines is √ε = {math.sqrt(EPS):.2g}, below which the "
        "norm before attention no longer normalises.",
        [
            *(
                _further(growth.panel(records, block, name, _fitted(records, block)), below, block)
                for block, name in (("Q", "query"), ("V", "value"))
            ),
            *(_further(growth.local(records, block, (0.0,)), below, block, local=True) for block in ("Q", "V")),
        ],
    )
    q, v = growth.curve(records, "Q", "total"), growth.curve(records, "V", "total")
    both = Sweep(q.x, q.values / v.values)
    numbers = (
        v.slope("fig3b V total whole", growth.WHOLE),
        q.slope("fig3b Q total whole", growth.WHOLE),
        both.slope("fig3b difference whole", growth.WHOLE),
    )
    finding = _closer(q, v, numbers, [growth.curve(below, block, "total") for block in ("Q", "V")])
    return Report(
        (chart,), (finding,), at_width(records, numbers), growth.laws(records, predicted=False), marked(records)
    )


def _below(records: Sequence[Record]) -> list[Record]:
    """The points below √ε, up to the first of the others, of the seeds that have them."""
    seeds = {record.config["seed"] for record in records if record.config["sigma"] < growth.WHOLE[0]}
    return [r for r in records if r.config["sigma"] <= growth.WHOLE[0] and r.config["seed"] in seeds]


def _further(panel: Panel, below: Sequence[Record], block: str, *, local: bool = False) -> Panel:
    """A panel with the curves of smaller σ beside its own, and √ε as a line."""
    more: list[Curve] = []
    for part, style in growth.STYLES.items():
        line = growth.curve(below, block, part)
        more.append(line.local("", **style) if local else line.curve("", **style))
    return replace(panel, curves=[*panel.curves, *more], lines=(math.sqrt(EPS), *panel.lines))


def _closer(q: Sweep, v: Sweep, fits: tuple[Number, Number, Number], below: Sequence[Sweep]) -> Finding:
    """Whether the slopes of two lines through all σ are close, whether lines describe the curves, and below √ε."""
    of_v, of_q, difference = fits
    places = [place for place in q.finite().x if place in v.finite().x]
    q, v = q.at(places), v.at(places)
    powers = [growth.equation_5("functional", "Q"), growth.equation_5("outer", "V")]
    without = abs((powers[0] or 0) - (powers[1] or 0))
    near = between(difference, -without / MUCH_LESS, without / MUCH_LESS)
    straight = following([(q, of_q.value), (v, of_v.value)])
    apart = [abs(a - b) for a, b in zip(q.slopes(), v.slopes(), strict=True)]
    averages = (
        f"as averages over σ from {q.x[0]:g} to {q.x[-1]:g}, since these curves are no power laws: local slopes go "
        f"from {extent(q)} (Q) and {extent(v)} (V)"
    )
    lines = straight is not None and straight.whole
    small = [line.law(LIMIT).slope for line in below]
    gap = Sweep(below[0].x, below[0].values / below[1].values).slope("", LIMIT)
    returns = between(gap, -without / MUCH_LESS, without / MUCH_LESS)
    limit = (
        f"σ is below √ε = {math.sqrt(EPS):.2g}: slopes are {small[0]:.2f} (Q) and {small[1]:.2f} (V), "
        f"{gap.value:.2f} ± {gap.error:.2f} apart (σ from {LIMIT[0]:g} to {LIMIT[1]:g})"
    )
    when = averages if not lines else f"σ from {q.x[0]:g} to {q.x[-1]:g}"
    return judged(
        "pre-ln",
        f"One line through σ from {q.x[0]:g} to {q.x[-1]:g}: {of_q.value:.2f} ± {of_q.error:.2f} (Q) and "
        f"{of_v.value:.2f} ± {of_v.error:.2f} (V), a difference of {difference.value:.2f} ± {difference.error:.2f}; "
        f"much less means at most 1/{MUCH_LESS:g} of the {without} that Equation 5 gives without norms. Local slopes "
        f"go from {extent(q)} (Q) and {extent(v)} (V), and are {min(apart):.2f} to {max(apart):.2f} apart; "
        + ("all are" if lines else "not all are")
        + f" within {LOCAL:g} of the lines. Where {limit}.",
        holds=all_of((near, returns)) if lines or not near else False,
        when=(when if returns else f"{when}; not where {limit}") if near and not (lines and returns) else "",
    )


def _fitted(records: Sequence[Record], block: str) -> list[Slope]:
    law = growth.curve(records, block, "total").law(growth.WHOLE)
    return [Slope(law.slope, growth.WHOLE, (1.0, law.prefactor), rf"$\sigma^{{{law.slope:.2f}}}$")]


FIG3B = Experiment(
    "fig3b",
    "Growth of the blocks with Pre-LN",
    f"{PAPER}, Figure 3b",
    points,
    growth.measure,
    report,
)
