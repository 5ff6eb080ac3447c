"""What was found, as pages: the verdict on every claim, the reference numbers, the figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from curvlens.papers.claims import CLAIMS
from curvlens.papers.comparisons import seeds as counted
from curvlens.papers.experiment import Effort, Experiment, Law, Report
from curvlens.papers.records import Record
from curvlens.papers.reference import COARSE, Comparison, compared, differences, explanations, references
from curvlens.papers.sources import CITED
from curvlens.papers.verdicts import Claim, Finding

MARK = "<!-- written by curvlens reproduce -->"


@dataclass(frozen=True)
class Shown:
    """An experiment with its report."""

    experiment: Experiment
    report: Report
    points: int
    seeds: int

    @classmethod
    def over(cls, experiment: Experiment, report: Report, records: Sequence[Record]) -> Shown:
        """With what it rests on."""
        return cls(experiment, report, len(records), len({record.config["seed"] for record in records}))

    @property
    def about(self) -> str:
        """Title, source and what it rests on."""
        rests = f"{self.points} points, {counted(self.seeds)}"
        return f"{self.experiment.title} ({self.experiment.source}; {rests})."


def _findings(shown: Sequence[Shown]) -> dict[str, tuple[Finding, Shown]]:
    return {finding.claim: (finding, each) for each in shown for finding in each.report.findings}


def _effort(effort: Effort) -> str:
    own = "" if effort.seeds is None else f", {effort.seeds} seeds"
    if effort.quick:
        models = "small models but for the published networks"
        return f"Quick settings: {models}{own or ', few seeds'}. At full size verdicts may be others."
    return f"Full settings{own}."


def _unseen(claim: Claim) -> str:
    """What a claim is that no finding is shown for."""
    return "open" if claim.open else "not measured"


def _counted(shown: Sequence[Shown]) -> str:
    found = _findings(shown)
    verdicts = Counter(found[c.name][0].verdict if c.name in found else _unseen(c) for c in CLAIMS)
    order = ("holds", "holds when", "does not hold", "undecided", "open", "not measured")
    return f"Of {len(CLAIMS)} claims: " + ", ".join(f"{verdicts[v]} {v}" for v in order if verdicts[v]) + "."


def markdown(shown: Sequence[Shown], effort: Effort, figures: str = "figures/") -> str:
    """One page: verdicts, numbers, figures. ``figures`` is where those are, seen from the page."""
    lines = [
        MARK,
        "# The papers, measured",
        "",
        "Every claim of *What does it mean to be a Transformer?*, of the slides on it, of *Closing the curvature "
        "gap* and of the article on the full block that can be measured, and what the measurements say. The page is "
        f"written by `curvlens reproduce`, from stored results. {_effort(effort)} {_counted(shown)}",
        "",
        f"{_WORDS} Sources: " + "; ".join(f"*{name}*: {text}" for name, text in CITED.items()) + ".",
        "",
        "## Verdicts",
        "",
        "| claim | from | measured | verdict | where it holds | shown by |",
        "|---|---|---|---|---|---|",
    ]
    found = _findings(shown)
    for claim in CLAIMS:
        if claim.name in found:
            finding, by = found[claim.name]
            link = f"[{by.experiment.name}](#{by.experiment.name})"
            cells = (claim.statement, claim.source, finding.measured, f"**{finding.verdict}**", finding.regime, link)
        else:
            cells = (claim.statement, claim.source, "", _unseen(claim), "", "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Reference numbers", "", _told_sources(), ""]
    lines += ["| what | measured | reference | source | difference over error | |", "|---|--:|--:|---|--:|---|"]
    lines += [_reference_row(each) for each in _compared(shown)]
    lines += [f"\n*{kind}.* {text}" for kind, text in _remarks(shown)]
    lines += ["", "## Growth rates", "", _LAWS, ""]
    for each in shown:
        if each.report.laws:
            lines += [f"### {each.experiment.name}: growth rates", ""]
            lines += [
                "| block | predicted | slope | where it is a power law | local slopes of the whole curve |",
                "|---|--:|--:|---|---|",
            ]
            lines += ["| " + " | ".join(_law_cells(law)) + " |" for law in each.report.laws]
            lines.append("")
    lines += ["## Figures", ""]
    for each in shown:
        lines += [f"### {each.experiment.name}", "", each.about, ""]
        for chart in each.report.charts:
            lines += [f"![{chart.title}]({figures}{chart.name}.svg)", "", chart.caption, ""]
        lines += [f"*{note}*\n" for note in each.report.notes]
    return "\n".join(lines).rstrip() + "\n"


def _compared(shown: Sequence[Shown]) -> list[Comparison]:
    return compared([number for each in shown for number in each.report.numbers])


def _remarks(shown: Sequence[Shown]) -> list[tuple[str, str]]:
    """On single comparisons, by what they are about."""
    found = _compared(shown)
    kinds = (("Within its sampling error", explanations(found)), ("Differs", differences(found)))
    return [(kind, text) for kind, texts in kinds for text in texts]


def _told_sources() -> str:
    sources = references()[1]
    return (
        "± is half of a 95 % interval; without ± a number is exact. Two numbers differ if they are farther apart "
        "than both ± together, added as squares, as one row in twenty would by chance if all rows were independent and "
        "all ± such intervals (many are ranges or rounding); the difference is given in parts of that. They are "
        "within the reference's sampling error if they would not differ with the ± that a mean over as many networks "
        "as the reference has, and which scatter as ours do, would have in its place. If they do not "
        f"differ, but our ± is more than {COARSE:g} times the reference's, there are too few seeds to tell. Of several "
        "slopes the one farthest from the prediction is shown, with its own ±. In brackets: the first and the last σ "
        "of a fit. "
        "Sources: " + "; ".join(f"*{name}*: {text}" for name, text in sources.items() if name != "paper") + "."
    )


def _reference_row(each: Comparison) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (*_reference_cells(each), each.outcome)) + " |"


def _reference_cells(each: Comparison) -> tuple[str, ...]:
    measured, reference = each.measured, each.reference
    window = f" (σ from {measured.window[0]:.3g} to {measured.window[1]:.3g})" if measured.window else ""
    comparable = each.outcome != "other width, not comparable" and math.isfinite(each.error)
    return (
        reference.what,
        with_error(measured.value, measured.error) + window,
        with_error(reference.value, reference.half),
        reference.source,
        f"{each.apart:.2f}" if comparable else "",
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


_LAWS = (
    "Slopes in the widest range of σ in which local slopes agree to 0.05, with the 95 % interval over the seeds. "
    "Where that range is narrow, the curve is no power law."
)


def _law_cells(law: Law) -> tuple[str, ...]:
    low, high = law.interval
    return (
        law.name,
        "" if law.predicted is None else f"{law.predicted:g}",
        f"{law.slope:.3f} ({low:.3f} to {high:.3f})",
        f"σ from {law.window[0]:.3g} to {law.window[1]:.3g}",
        f"{law.flattest:.2f} to {law.steepest:.2f}",
    )


def html(shown: Sequence[Shown], effort: Effort, pictures: Mapping[str, str]) -> str:
    """The same as one file that needs no other: ``pictures`` are the SVGs by the names of their charts."""
    found = _findings(shown)
    rows = []
    for claim in CLAIMS:
        finding, by = found.get(claim.name, (None, None))
        verdict = finding.verdict if finding else _unseen(claim)
        link = f'<a href="#{escape(by.experiment.name)}">{escape(by.experiment.name)}</a>' if by else ""
        cells = (
            f"{escape(claim.statement)}<br><small>{escape(claim.source)}</small>",
            escape(finding.measured) if finding else "",
            f'<b class="{verdict.replace(" ", "-")}">{verdict}</b>',
            escape(finding.regime) if finding else "",
            link,
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    numbers = [
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in _reference_cells(each))
        + f'<td><b class="{_CLASSES.get(each.outcome, "open")}">{each.outcome}</b></td></tr>'
        for each in _compared(shown)
    ]
    parts = []
    for each in shown:
        parts.append(f'<h3 id="{escape(each.experiment.name)}">{escape(each.experiment.name)}</h3>')
        parts.append(f"<p>{escape(each.about)}</p>")
        for chart in each.report.charts:
            parts.append(f"<figure>{pictures[chart.name]}<figcaption>{escape(chart.caption)}</figcaption></figure>")
        parts += [f"<p><i>{escape(note)}</i></p>" for note in each.report.notes]
        if each.report.laws:
            rows_ = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _law_cells(law)) + "</tr>"
                for law in each.report.laws
            )
            parts.append(
                f"<details><summary>Growth rates</summary><p>{_LAWS}</p><table>{_LAW_HEAD}{rows_}</table></details>"
            )
    return _HTML.format(
        mark=MARK,
        effort=escape(f"{_effort(effort)} {_counted(shown)}"),
        sources_of_claims="; ".join(f"<i>{escape(name)}</i>: {escape(text)}" for name, text in CITED.items()) + ".",
        claims="\n".join(rows),
        numbers="\n".join(numbers),
        sources=_told_sources().replace("*", ""),
        words=_WORDS.replace("*", ""),
        notes="".join(f"<p><i>{kind}.</i> {escape(text)}</p>" for kind, text in _remarks(shown)),
        contents=", ".join(f'<a href="#{each.experiment.name}">{each.experiment.name}</a>' for each in shown),
        figures="\n".join(parts),
    )


_WORDS = (
    "*Holds* is what is so wherever it was measured; *holds when* is what is so for a part of what is claimed, some of "
    "the blocks or at least a decade of the range, and says which; *does not hold* is what is so for no part of it; "
    "*undecided* is what holds for no part, as far as the seeds can tell, and may for some; *open* what no experiment "
    "bears on yet. H is the Hessian of the loss, H_o its "
    "outer (Gauss–Newton) part and H_f = H − H_o its functional part; H(Q) or H(Q,Q) is the block of W_Q, H(V,Q) that "
    "of two weights; norms are Frobenius norms unless they are called spectral. T-outer and T-functional part are the "
    "same split made at the scores T. σ is the standard deviation of the embeddings. Attention is even where all "
    "weights are equal; a matrix is hollow where its diagonal blocks are zero. A local slope is that between "
    "neighbouring points of a curve in log-log axes; “in a seed” means in pairs of the same draws. Curves over σ are "
    "geometric means over the seeds. Bands are 95 % intervals of the mean over the seeds, or the range of fewer than "
    "five seeds, unless a caption says otherwise."
)
_CLASSES = {"agrees": "holds", "within the reference's sampling error": "holds", "differs": "does-not-hold"}
_LAW_HEAD = (
    "<tr><th>block</th><th>predicted</th><th>slope</th><th>where it is a power law</th><th>local slopes of the whole "
    "curve</th></tr>"
)
_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{mark}<title>The papers, measured</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }}
table {{ border-collapse: collapse; width: 100%; }} .wide td:first-child {{ min-width: 14rem; }}
@media (max-width: 50rem) {{ .wide {{ overflow-x: auto; }} }}
td, th {{ border-bottom: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top; }}
th {{ position: sticky; top: 0; background: #fff; }}
small {{ color: #666; }} figure {{ margin: 1rem 0 2rem; }} figure svg {{ max-width: 100%; height: auto; }}
figcaption {{ color: #444; max-width: 50rem; }}
.holds {{ color: #006d4f; }} .holds-when {{ color: #8a5a00; }}
.does-not-hold {{ color: #a3260f; }} .open, .undecided, .not-measured {{ color: #777; }}
</style></head><body>
<h1>The papers, measured</h1><p>{effort}</p><p>{words}</p><p>{sources_of_claims}</p>
<p><a href="#verdicts">Verdicts</a>, <a href="#reference-numbers">reference numbers</a>, figures: {contents}.</p>
<h2 id="verdicts">Verdicts</h2>
<div class="wide"><table>
<tr><th>claim</th><th>measured</th><th>verdict</th><th>where it holds</th><th>shown by</th></tr>
{claims}</table></div>
<h2 id="reference-numbers">Reference numbers</h2><p>{sources}</p>
<div class="wide"><table><tr><th>what</th><th>measured</th><th>reference</th><th>source</th>
<th>difference over error</th><th></th></tr>
{numbers}</table></div>{notes}
<h2>Figures</h2>
{figures}
</body></html>
"""
