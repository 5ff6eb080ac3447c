"""Figure 3b: growth with Pre-LN, where no block is a power law."""

from __future__ import annotations

from collections.abc import Sequence

from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper import growth
from curvlens.experiments.sizes import marked
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Slope


def points(effort: Effort) -> list[Config]:
    """Those of Figure 3a, with Pre-LN."""
    return growth.points("pre", effort, growth.sigmas(effort))


def report(records: Sequence[Record]) -> Report:
    """The same with Pre-LN, where no block is a power law."""
    chart = Chart(
        "fig3b",
        "Pre-LN: the blocks shrink with the size of the embeddings, and are no power laws",
        "As Figure 3a, with norms before attention, before the MLP and before the unembedding. Grey: one line "
        "through all σ, as in the paper. Below, the local slopes: they are not constant.",
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
    law = q.law()
    spread = (min(law.local), max(law.local))
    near = abs(numbers[2].value) < 1
    verdict: Verdict = "does not hold" if not near else "holds" if spread[1] - spread[0] < 0.1 else "holds when"
    finding = Finding(
        "pre-ln",
        verdict,
        f"One line through all σ: {numbers[1].value:.2f} ± {numbers[1].error:.2f} (Q) and {numbers[0].value:.2f} ± "
        f"{numbers[0].error:.2f} (V), a difference of {numbers[2].value:.2f} ± {numbers[2].error:.2f}. "
        f"The local slope of Q goes from {spread[0]:.2f} to {spread[1]:.2f}.",
        "as a comparison of two averages; no exponent describes either curve" if verdict == "holds when" else "",
    )
    return Report((chart,), (finding,), numbers, growth.laws(records, predicted=False), marked(records))


def _fitted(records: Sequence[Record], block: str) -> list[Slope]:
    law = growth.curve(records, block, "total").law(growth.WHOLE)
    return [Slope(law.slope, growth.WHOLE, (1.0, law.prefactor), rf"$\sigma^{{{law.slope:.2f}}}$")]


FIG3B = Experiment(
    "fig3b",
    "The same with Pre-LN",
    f"{PAPER}, Figure 3b",
    points,
    growth.measure,
    report,
)
