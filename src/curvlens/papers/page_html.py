"""The verdict page as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from curvlens.papers.experiment import Effort
from curvlens.papers.headlines import headline
from curvlens.papers.shown import (
    LAW_COLUMNS,
    LAWS,
    REFERENCE_COLUMNS,
    TITLE,
    WORDS,
    Shown,
    by_measured,
    comparisons,
    counts,
    effort_told,
    findings,
    law_cells,
    reference_cells,
    remarks,
    sources_told,
    unseen,
)
from curvlens.papers.sources import CITED
from curvlens.papers.verdicts import Claim, Finding
from curvlens.report.content import Column, Content, Facts, Fold, Link, Mark, Prose, Svg, Table, Tone, Words
from curvlens.report.page import Page, Section

_TONES: dict[str, Tone] = {
    "holds": "good",
    "holds when": "warn",
    "does not hold": "bad",
    "agrees": "good",
    "within the reference's sampling error": "good",
    "differs": "bad",
}


def html(shown: Sequence[Shown], effort: Effort, pictures: Mapping[str, str]) -> str:
    """The whole page as one self-contained file. ``pictures`` are the SVGs by the names of their charts."""
    found = findings(shown)
    claims = [_claim(claim, *found.get(claim.name, (None, None))) for claim in by_measured(found)]
    return Page(
        TITLE,
        [
            Section("verdicts", "Verdicts", "Open a line for all numbers of a claim.", claims),
            Section("reference-numbers", "Reference numbers", "", _references(shown)),
            *(_figures(each, pictures) for each in shown),
        ],
        lead=[
            Prose(f"{effort_told(effort)} {counts(shown)}"),
            Fold("Words on this page", [Prose(WORDS.replace("*", ""))]),
            Fold("Sources", [Facts(CITED)]),
        ],
        filtered="claims",
    ).html()


def _claim(claim: Claim, finding: Finding | None, by: Shown | None) -> Fold:
    """One line: the sentence, the verdict, one number, the figure."""
    source = Prose(("From: ", claim.source, "."), "faint")
    if finding is None or by is None:
        return Fold(claim.statement, [source], aside=[Mark(unseen(claim), "faint"), "", ""], filtered=True)
    number, what = headline(finding)
    aside: list[Words] = [
        Mark(finding.verdict, _TONES.get(finding.verdict, "faint")),
        (Mark(f"{what}: ", "faint"), number) if number else "",
        Link(by.experiment.name, by.experiment.name),
    ]
    details = [Prose((Mark("Where it holds: "), finding.regime))] if finding.regime else []
    return Fold(
        claim.statement,
        [*details, Prose((Mark("Measured: "), finding.measured)), source],
        f"claim-{claim.name}",
        aside,
        filtered=True,
    )


def _references(shown: Sequence[Shown]) -> list[Content]:
    columns = [
        Column(title, title in ("measured", "reference", "difference over error")) for title in REFERENCE_COLUMNS
    ]
    rows: list[list[Words]] = []
    for each in comparisons(shown):
        *cells, outcome = reference_cells(each)
        rows.append([*cells, Mark(outcome, _TONES.get(outcome, "faint"))])
    told = Fold("How numbers are compared", [Prose(sources_told().replace("*", ""))])
    return [told, Table(columns, rows), *(Prose((Mark(f"{kind}. ", "em"), text)) for kind, text in remarks(shown))]


def _figures(each: Shown, pictures: Mapping[str, str]) -> Section:
    """The figures of an experiment, and its growth rates."""
    body: list[Content] = [Svg(pictures[chart.name], chart.title, chart.caption) for chart in each.report.charts]
    body += [Prose(note, "warn") for note in each.report.notes]
    if each.report.laws:
        columns = [Column(title, title in ("predicted", "slope")) for title in LAW_COLUMNS]
        body.append(Fold("Growth rates", [Prose(LAWS), Table(columns, [law_cells(law) for law in each.report.laws])]))
    return Section(each.experiment.name, each.experiment.name, each.about, body)
