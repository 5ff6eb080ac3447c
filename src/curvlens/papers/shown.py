"""What the pages of the papers say, as texts: findings, comparisons, growth rates, words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from curvlens.papers.claims import CLAIMS
from curvlens.papers.comparisons import seeds as counted
from curvlens.papers.experiment import Effort, Experiment, Law, Report
from curvlens.papers.reference import COARSE, Comparison, compared, differences, explanations, references
from curvlens.papers.verdicts import Claim, Finding
from curvlens.study import Record

TITLE = "The papers, measured"
REFERENCE_COLUMNS = ("what", "measured", "reference", "source", "difference over error", "")
LAW_COLUMNS = ("block", "predicted", "slope", "where it is a power law", "local slopes of the whole curve")


@dataclass(frozen=True)
class Shown:
    """An experiment with its report."""

    experiment: Experiment
    report: Report
    points: int
    seeds: int

    @classmethod
    def over(cls, experiment: Experiment, report: Report, records: Sequence[Record]) -> Shown:
        """An experiment with its report, and the numbers of points and seeds."""
        return cls(experiment, report, len(records), len({record.config["seed"] for record in records}))

    @property
    def about(self) -> str:
        """Title, source, and numbers of points and seeds."""
        rests = f"{self.points} points, {counted(self.seeds)}"
        return f"{self.experiment.title} ({self.experiment.source}; {rests})."


def findings(shown: Sequence[Shown]) -> dict[str, tuple[Finding, Shown]]:
    """The finding on each claim, and its experiment."""
    return {finding.claim: (finding, each) for each in shown for finding in each.report.findings}


def by_measured(found: Mapping[str, tuple[Finding, Shown]]) -> list[Claim]:
    """All claims, those with a finding first."""
    return sorted(CLAIMS, key=lambda claim: claim.name not in found)


def effort_told(effort: Effort) -> str:
    """The settings of the run, as a sentence."""
    own = "" if effort.seeds is None else f", {effort.seeds} seeds"
    if effort.quick:
        models = "small models, except for the published networks"
        return f"Quick settings: {models}{own or ', few seeds'}. At full size verdicts may differ."
    return f"Full settings{own}."


def unseen(claim: Claim) -> str:
    """The status of a claim without a finding."""
    return "open" if claim.open else "not measured"


def counts(shown: Sequence[Shown]) -> str:
    """How many claims have which verdict."""
    found = findings(shown)
    verdicts = Counter(found[c.name][0].verdict if c.name in found else unseen(c) for c in CLAIMS)
    order = ("holds", "holds when", "does not hold", "undecided", "open", "not measured")
    return f"Of {len(CLAIMS)} claims: " + ", ".join(f"{verdicts[v]} {v}" for v in order if verdicts[v]) + "."


def comparisons(shown: Sequence[Shown]) -> list[Comparison]:
    """All measured numbers beside their references."""
    return compared([number for each in shown for number in each.report.numbers])


def remarks(shown: Sequence[Shown]) -> list[tuple[str, str]]:
    """Remarks on single comparisons: (kind, sentence)."""
    found = comparisons(shown)
    kinds = (("Within its sampling error", explanations(found)), ("Differs", differences(found)))
    return [(kind, text) for kind, texts in kinds for text in texts]


def sources_told() -> str:
    """How numbers are compared, and the sources of the references."""
    sources = references()[1]
    return (
        "± is half of a 95 % interval; a number without ± is exact. Two numbers differ if their difference is larger "
        "than its error, the root of the sum of both ± squared. The table has the difference over this error. If all "
        "rows were independent and all ± 95 % intervals (many are ranges or rounding), one row in twenty would differ "
        "by chance. A number is within the reference's sampling error if the difference disappears once the reference "
        "gets the ± of a mean over its number of networks, with the scatter of ours. If two numbers do not "
        f"differ, but our ± is more than {COARSE:g} times the reference's, there are too few seeds to tell. Of several "
        "slopes the one farthest from the prediction is shown, with its own ±. In brackets: the first and the last σ "
        "of a fit. "
        "Sources: " + "; ".join(f"*{name}*: {text}" for name, text in sources.items() if name != "paper") + "."
    )


def reference_cells(each: Comparison) -> tuple[str, ...]:
    """A comparison as texts, in the order of `REFERENCE_COLUMNS`."""
    measured, reference = each.measured, each.reference
    window = f" (σ from {measured.window[0]:.3g} to {measured.window[1]:.3g})" if measured.window else ""
    comparable = each.outcome != "other width, not comparable" and math.isfinite(each.error)
    return (
        reference.what,
        with_error(measured.value, measured.error) + window,
        with_error(reference.value, reference.half),
        reference.source,
        f"{each.apart:.2f}" if comparable else "",
        each.outcome,
    )


def with_error(value: float, error: float) -> str:
    """A number to the digits that its error leaves it.

    >>> with_error(1.7352, 0.17), with_error(-6.3805, 0.004), with_error(2.0, 0.0)
    ('1.74 ± 0.17', '-6.3805 ± 0.0040', '2')
    """
    if math.isinf(error):
        return f"{value:.5g} (one seed)"
    if error < 1e-9 * max(1.0, abs(value)):
        return f"{value:.5g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


LAWS = (
    "Slopes in the widest range of σ in which local slopes agree to 0.05, with the 95 % interval over the seeds. "
    "If that range is narrow, the curve is not a power law."
)


def law_cells(law: Law) -> tuple[str, ...]:
    """A growth rate as texts, in the order of `LAW_COLUMNS`."""
    low, high = law.interval
    return (
        law.name,
        "" if law.predicted is None else f"{law.predicted:g}",
        f"{law.slope:.3f} ({low:.3f} to {high:.3f})",
        f"σ from {law.window[0]:.3g} to {law.window[1]:.3g}",
        f"{law.flattest:.2f} to {law.steepest:.2f}",
    )


WORDS = (
    "*Holds*: the claim holds wherever it was measured. *Holds when*: it holds for a part, some of the blocks or at "
    "least a decade of the range; the finding says which. *Does not hold*: it is refuted for every part. *Undecided*: "
    "it holds for no part, but for some the seeds are too few to tell. *Open*: no experiment measures it yet. H is the "
    "Hessian of the loss, H_o its outer (Gauss–Newton) part and H_f = H − H_o its functional part. H(Q) or H(Q,Q) is "
    "the block of W_Q, H(V,Q) the block of two weights. Norms are Frobenius norms unless they are called spectral. "
    "The T-outer and T-functional parts are the same split made at the scores T. σ is the standard deviation of the "
    "embeddings. Attention is even if all weights are equal. A matrix is hollow if its diagonal blocks are zero. A "
    "local slope is the slope between neighbouring points of a curve in log-log axes. “In a seed” means in pairs of "
    "the same draws. Curves over σ are geometric means over the seeds. Bands are 95 % intervals of the mean over the "
    "seeds, or the range if there are fewer than five seeds, unless a caption says otherwise."
)
