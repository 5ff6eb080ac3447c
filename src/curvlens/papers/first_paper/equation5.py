"""Figure 3a: the powers of σ with which the blocks of attention grow, against Equation 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from curvlens.calculus.form import SplitPart
from curvlens.papers.comparisons import ratio, seeds
from curvlens.papers.experiment import Effort, Experiment, Report, at_width
from curvlens.papers.first_paper import growth
from curvlens.papers.parts import PARTS, SIGNS, SPLIT, signed
from curvlens.papers.ranges import LOCAL, extent, following, judged_range, told, widest
from curvlens.papers.setting import SEQUENCES
from curvlens.papers.sizes import marked
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, mean
from curvlens.papers.verdicts import Finding
from curvlens.report.charts import Chart, Slope
from curvlens.study import Config, Record

FUNCTIONAL = 5
"""The power of the query block's functional part in Equation 5; its outer part has one more."""
BELOW = (growth.WHOLE[0], 0.99)
"""Where the authors' σ below 1 lie: the last of them is 0.785."""
BEYOND = (3.0, growth.WHOLE[1])
"""Where attention saturates."""
APART = 0.5
"""How far apart the slopes of two curves are that do not grow alike."""


def points(effort: Effort) -> list[Config]:
    """Without norms; also where the ranges of the reference numbers meet."""
    return growth.points("none", effort, sorted({*growth.sigmas(effort), growth.SMALL[1], growth.LARGE[0]}))


def report(records: Sequence[Record]) -> Report:
    """Slopes against Equation 5."""
    width, sequences = records[0].config["width"], SEQUENCES
    charts = (
        Chart(
            "fig3a",
            "Growth of the query and value blocks with the size of the embeddings",
            f"Frobenius norms of the diagonal blocks of one Transformer block without norms, d = {width}, "
            f"cross-entropy of 5-digit addition over {sequences} sequences: geometric mean over the seeds with its "
            "95 % interval. Dashed grey: the powers of Equation 5, drawn a little below. The functional part of the "
            "value block is zero in closed form; `value-functional` has it by automatic differentiation. "
            f"{_outer_at_large(records)} {_below_one(records)}",
            [
                growth.panel(records, "Q", "query", _predicted(records, "Q")),
                growth.panel(records, "V", "value", _predicted(records, "V")),
                growth.local(records, "Q", _powers("Q")),
                growth.local(records, "V", _powers("V")),
            ],
        ),
        Chart(
            "fig3a-all-blocks",
            "Growth of all blocks of the attention weights",
            f"As before, for the blocks that the paper leaves out; those of two weights over {_crossed(records)} only. "
            "Dashed grey: the powers of Equation 5. Behind attention W_O belongs to the value, and is not in it: the "
            "pair (V, O) is a linear network of two layers.",
            [
                growth.panel(
                    records,
                    block,
                    f"({', '.join(block * (3 - len(block)))})",
                    () if "O" in block else _predicted(records, block),
                )
                for block in ("K", "O", *growth.PAIRS)
            ],
            columns=4,
        ),
    )
    numbers = []
    for block, part in (("V", "total"), ("Q", "total"), ("Q", "outer"), ("Q", "functional")):
        found = growth.curve(records, block, part)
        numbers.append(found.slope(f"fig3a {block} {part} small", growth.SMALL))
        if part == "total":
            numbers.append(found.slope(f"fig3a {block} {part} large", growth.LARGE))
    q, v = growth.curve(records, "Q", "total"), growth.curve(records, "V", "total")
    numbers.append(Sweep(q.x, q.values / v.values).slope("fig3a difference whole", growth.WHOLE))
    findings = (
        _power("growth-value", growth.curve(records, "V", "total"), 2),
        _query(records),
        _power("growth-query-outer", growth.curve(records, "Q", "outer"), 6),
        _all_blocks(records),
    )
    return Report(charts, findings, at_width(records, numbers), growth.laws(records, predicted=True), marked(records))


def _crossed(records: Sequence[Record]) -> str:
    """The seeds that have the blocks off the diagonal."""
    return seeds(len({record.config["seed"] for record in records if "QK" in record.result["norms"]}))


def _predicted(records: Sequence[Record], block: str) -> list[Slope]:
    found = []
    for part in SPLIT:
        power = growth.equation_5(part, block)
        if power is not None:
            line = growth.curve(records, block, part).curve("")
            found.append(Slope(power, (line.x[0], 1.0), (line.x[0], line.y[0] / 4), rf"$\sigma^{power}$"))
    return found


def _powers(block: str) -> list[float]:
    """Of the parts of a diagonal block that are not zero."""
    powers = [growth.equation_5(part, block) for part in SPLIT]
    return [power for power in powers if power is not None]


def _told(found: Sweep) -> str:
    """A curve's power where it is a power law, for small σ and for large."""
    law = found.law()
    low, high = law.interval
    small, large = found.slope("", growth.SMALL), found.law(growth.LARGE)
    return (
        f"σ^{law.slope:.3f} ({low:.3f} to {high:.3f}) for σ from {law.window[0]:.3g} to {law.window[1]:.3g}; "
        f"σ^{small.value:.4f} ± {small.error:.4f} for σ ≤ 0.1; σ^{large.slope:.2f} for σ from 1 to 10{_beyond(found)}; "
        f"local slopes from {extent(found)}"
    )


def _beyond(found: Sweep) -> str:
    """A curve's power for the largest σ, if there are places enough."""
    far = found.finite().within(*BEYOND)
    if len(far.x) < 3:
        return ""
    slope = far.slope("", (far.x[0], far.x[-1]))
    return f"; σ^{slope.value:.2f} ± {slope.error:.2f} for σ from {far.x[0]:.2g} to {far.x[-1]:.2g}"


def _cosines(curves: Mapping[SplitPart, Sweep]) -> str:
    """⟨H_o, H_f⟩/(‖H_o‖ ‖H_f‖), which the three norms give, at the smallest σ, at 1 and at the largest."""
    x = [place for place in curves["total"].x if all(place in line.finite().x for line in curves.values())]
    if not x:
        return ""
    outer, functional, total = (curves[part].at(x).values for part in PARTS)
    cosines = (total.square() - outer.square() - functional.square()) / (2 * outer * functional)
    nearest = min(range(len(x)), key=lambda i: abs(math.log(x[i])))
    found = {x[i]: mean("", cosines[:, i].tolist()) for i in (0, nearest, len(x) - 1)}
    told_all = ", ".join(f"{each.value:.3f} ± {each.error:.3f} (σ = {place:.2g})" for place, each in found.items())
    return f" The cosine between H_o and H_f: {told_all}."


def _power(claim: str, found: Sweep, power: int) -> Finding:
    """Whether a curve is a power law, and where."""
    where = following([(found, power)])
    return judged_range(claim, f"{_told(found)}; within {LOCAL:g} of {power} for {told(where)}.", where)


def _query(records: Sequence[Record]) -> Finding:
    """The whole query block: with the power of its functional part, where the outer part has another."""
    curves = {part: growth.curve(records, "Q", part) for part in PARTS}
    x = [place for place in curves["total"].finite().x if all(place in line.finite().x for line in curves.values())]
    slopes = {part: line.at(x).slopes() for part, line in curves.items()}
    steps = [
        max(abs(total - FUNCTIONAL), abs(functional - FUNCTIONAL)) <= LOCAL and abs(outer - total) >= APART
        for outer, functional, total in zip(*(slopes[part] for part in PARTS), strict=True)
    ]
    where = widest(x, steps)
    small = {part: curves[part].law(growth.SMALL).slope for part in SPLIT}
    return judged_range(
        "growth-query",
        f"The whole block: {_told(curves['total'])}. Its parts for σ ≤ 0.1: H_f σ^{small['functional']:.3f}, H_o "
        f"σ^{small['outer']:.3f}. "
        f"The local slopes of H and H_f are within {LOCAL:g} of {FUNCTIONAL}, and H_o's at least {APART:g} away from "
        f"H's, for {told(where)}.{_cosines(curves)}",
        where,
    )


def _all_blocks(records: Sequence[Record]) -> Finding:
    curves, texts = [], []
    for block in ("Q", "K", "V", "QK", "QV", "KV"):
        for part in SPLIT:
            power = growth.equation_5(part, block)
            if power is None:
                continue
            found = growth.curve(records, block, part)
            own = following([(found, power)])
            curves.append((found, float(power)))
            texts.append(
                f"{signed(part, growth.pair(block))} {found.law(growth.SMALL).slope:.3f} ({power}; {told(own)}; "
                f"{found.law(growth.LARGE).slope:.2f})"
            )
    where = following(curves)
    return judged_range(
        "growth-all",
        f"Slope for σ ≤ 0.1 (predicted; where local slopes are within {LOCAL:g} of that; slope for σ from 1 to 10): "
        + ", ".join(texts)
        + f". All of them together: {told(where)}.",
        where,
    )


def _below_one(records: Sequence[Record]) -> str:
    """The slopes in the window of the published fits."""
    found = [
        (growth.curve(records, block, part).slope("", BELOW), f"{SIGNS[part]}({block})")
        for block, part in (("V", "total"), ("Q", "total"), ("Q", "outer"), ("Q", "functional"))
    ]
    low, high = found[0][0].window or BELOW
    return (
        f"One line through σ from {low:g} to {high:.3g}: "
        + ", ".join(f"{slope.value:.3f} ± {slope.error:.3f} ({name})" for slope, name in found)
        + "; the networks that the published fits are of are in `published`."
    )


def _outer_at_large(records: Sequence[Record]) -> str:
    """Which part is the larger one at the largest σ."""
    found = []
    for block in ("Q", "K", "QK", "QV", "KV"):
        outer, functional = (growth.curve(records, block, part) for part in SPLIT)
        found.append(f"{ratio(outer.values[:, -1], functional.values[:, -1])} ({', '.join(growth.pair(block))})")
    return f"‖H_o‖/‖H_f‖ at σ = {outer.x[-1]:g}: " + "; ".join(found) + "."


FIG3A = Experiment(
    "fig3a",
    "Growth of the blocks with the size of the embeddings",
    f"{PAPER}, Figure 3a and Equation 5",
    points,
    growth.measure,
    report,
)
