"""Figure 3a: the powers of σ with which the blocks of attention grow, against Equation 5."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.first_paper import growth
from curvlens.experiments.parts import SPLIT, signed
from curvlens.experiments.sizes import marked, number
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Slope


def points(effort: Effort) -> list[Config]:
    """Without norms."""
    return growth.points("none", effort, growth.sigmas(effort))


def report(records: Sequence[Record]) -> Report:
    """Slopes against Equation 5."""
    charts = (
        Chart(
            "fig3a",
            "Growth of the query and value blocks with the size of the embeddings",
            "Frobenius norms of the diagonal blocks of one Transformer block without norms, cross-entropy of "
            "5-digit addition: mean over the seeds with its 95 % interval. Dashed grey: the powers of Equation 5, "
            "drawn a little below. The functional part of the value block is exactly zero.",
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
            "As before, for the blocks that the paper leaves out. Behind attention W_O belongs to the value: the "
            "pair (V, O) is a linear network of two layers.",
            [
                growth.panel(records, block, f"({', '.join(block * (3 - len(block)))})")
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
    zero = max(abs(number(record.result["norms"]["V"][1])) for record in records)
    numbers.append(Number("fig3a V functional", zero, 0.0))
    q, v = growth.curve(records, "Q", "total"), growth.curve(records, "V", "total")
    numbers.append(Sweep(q.x, q.values / v.values).slope("fig3a difference whole", growth.WHOLE))
    findings = [
        _power("growth-value", growth.curve(records, "V", "total"), 2),
        _power("growth-query", growth.curve(records, "Q", "total"), 5),
        _power("growth-query-outer", growth.curve(records, "Q", "outer"), 6),
        Finding(
            "value-functional",
            "holds" if zero == 0 else "does not hold",
            f"The largest norm over all σ and seeds is {zero:g}.",
        ),
        _all_blocks(records),
        _outer_at_large(records),
    ]
    return Report(charts, tuple(findings), tuple(numbers), growth.laws(records, predicted=True), marked(records))


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


def _power(claim: str, found: Sweep, power: int) -> Finding:
    """Whether a curve is a power law, and until where."""
    law = found.law()
    low, high = law.interval
    small = found.slope("", growth.SMALL)
    beyond = found.law(growth.LARGE)
    right = abs(law.slope - power) < 0.05
    text = (
        f"σ^{law.slope:.3f} ({low:.3f} to {high:.3f}) for σ from {law.window[0]:.3g} to {law.window[1]:.3g}; "
        f"σ^{small.value:.4f} ± {small.error:.4f} for σ ≤ 0.1; σ^{beyond.slope:.2f} for σ from 1 to 10."
    )
    if not right:
        return Finding(claim, "does not hold", text)
    everywhere = abs(beyond.slope - power) < 0.05
    regime = "" if everywhere else f"σ ≤ {law.window[1]:.2g}; beyond, attention saturates and the power is smaller"
    return Finding(claim, "holds" if everywhere else "holds when", text, regime)


def _all_blocks(records: Sequence[Record]) -> Finding:
    worst, texts = 0.0, []
    for block in ("Q", "K", "V", "QK", "QV", "KV"):
        for part in SPLIT:
            power = growth.equation_5(part, block)
            if power is None:
                continue
            slope = growth.curve(records, block, part).law(growth.SMALL).slope
            worst = max(worst, abs(slope - power))
            texts.append(f"{signed(part, growth.pair(block))} {slope:.3f} ({power})")
    return Finding(
        "growth-all",
        "holds when" if worst < 0.05 else "does not hold",
        "Measured (predicted) for σ ≤ 0.1: " + ", ".join(texts) + ".",
        "σ ≤ 0.1",
    )


def _outer_at_large(records: Sequence[Record]) -> Finding:
    """The share of the outer part at the largest σ, with the residual as it is."""
    texts, dominated = [], {}
    for block in ("Q", "K", "V", "QK", "QV"):
        outer, functional = (growth.curve(records, block, part).curve("").y[-1] for part in SPLIT)
        texts.append(f"{block}: {outer:.2g} against {functional:.2g}")
        dominated[block] = outer > functional
    some = any(dominated.values())
    verdict: Verdict = "holds" if all(dominated.values()) else "holds when" if some else "does not hold"
    return Finding(
        "outer-large",
        verdict,
        f"‖H_o‖ against ‖H_f‖ at σ = {growth.curve(records, 'Q', 'outer').x[-1]:g}: " + "; ".join(texts) + ".",
        "" if verdict != "holds when" else "the blocks " + ", ".join(block for block, yes in dominated.items() if yes),
    )


FIG3A = Experiment(
    "fig3a",
    "Growth of the blocks with the size of the embeddings",
    f"{PAPER}, Figure 3a and Equation 5",
    points,
    growth.measure,
    report,
)
