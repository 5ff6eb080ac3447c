"""Figure 3b: growth with Pre-LN, one line through all σ and local slopes."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens.experiments.comparisons import between
from curvlens.experiments.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.experiments.first_paper import growth
from curvlens.experiments.ranges import LOCAL, extent, following
from curvlens.experiments.records import Config, Record
from curvlens.experiments.sizes import marked
from curvlens.experiments.sources import PAPER
from curvlens.experiments.sweeps import Sweep
from curvlens.experiments.verdicts import Finding, judged
from curvlens.figures.charts import Chart, Slope

MUCH_LESS = 3.0
"""A difference of growth rates is much smaller than another if it is at most one part in so many."""


def points(effort: Effort) -> list[Config]:
    """Those of Figure 3a, with Pre-LN."""
    return growth.points("pre", effort, growth.sigmas(effort))


def report(records: Sequence[Record]) -> Report:
    """The difference of the growth rates of query and value."""
    chart = Chart(
        "fig3b",
        "Pre-LN: the query and value blocks over the size of the embeddings",
        "As Figure 3a, with norms before attention, before the MLP and before the unembedding. Grey: one line "
        "through all σ, as in the paper. Below, the local slopes.",
        [
            growth.panel(records, "Q", "query", _fitted(records, "Q")),
            growth.panel(records, "V", "value", _fitted(records, "V")),
            growth.local(records, "Q", (0.0,)),
            growth.local(records, "V", (0.0,)),
        ],
    )
    q, v = growth.curve(records, "Q", "total"), growth.curve(records, "V", "total")
    both = Sweep(q.x, q.values / v.values)
    numbers = (
        v.slope("fig3b V total whole", growth.WHOLE),
        q.slope("fig3b Q total whole", growth.WHOLE),
        both.slope("fig3b difference whole", growth.WHOLE),
    )
    finding = _closer(q, v, numbers)
    return Report(
        (chart,), (finding,), at_width(records, numbers), growth.laws(records, predicted=False), marked(records)
    )


def _closer(q: Sweep, v: Sweep, fits: tuple[Number, Number, Number]) -> Finding:
    """Whether the slopes of two lines through all σ are close, and whether lines describe the curves."""
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
    return judged(
        "pre-ln",
        f"One line through all σ: {of_q.value:.2f} ± {of_q.error:.2f} (Q) and {of_v.value:.2f} ± {of_v.error:.2f} "
        f"(V), a difference of {difference.value:.2f} ± {difference.error:.2f}; much less is at most 1/{MUCH_LESS:g} "
        f"of the {without} that Equation 5 gives without norms. Local slopes go from {extent(q)} (Q) and {extent(v)} "
        f"(V), and are {min(apart):.2f} to {max(apart):.2f} apart; "
        + ("all are" if lines else "not all are")
        + f" within {LOCAL:g} of the lines.",
        holds=near if lines or not near else False,
        when=averages if near and not lines else "",
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
