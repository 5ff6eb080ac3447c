"""The verdict page as Markdown: one line per claim, with details in a fold that GitHub and the documentation open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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

MARK = "<!-- written by curvlens reproduce -->"


def markdown(shown: Sequence[Shown], effort: Effort, figures: str = "figures/") -> str:
    """One page: verdicts, numbers, figures. ``figures`` is the path of the figures, relative to the page."""
    found = findings(shown)
    sources = "; ".join(f"{name}: {text}" for name, text in CITED.items()) + "."
    lines = [
        MARK,
        f"# {TITLE}",
        "",
        "This page lists every measurable claim of *What does it mean to be a Transformer?*, of the slides on it, of "
        "*Closing the curvature gap* and of the article on the full block, with what was measured. `curvlens "
        f"reproduce` writes it from stored results. {effort_told(effort)} {counts(shown)}",
        "",
        *_fold("Words on this page", [WORDS.replace("*", "")]),
        *_fold("Sources", [sources]),
        "",
        "## Verdicts",
        "",
        "One line per claim: the sentence, the verdict, one number, the figure. Open a line for all numbers.",
        "",
    ]
    for claim in by_measured(found):
        lines += _claim(claim, *found.get(claim.name, (None, None)))
    lines += ["", "## Reference numbers", "", *_fold("How numbers are compared", [sources_told().replace("*", "")]), ""]
    lines += _table(REFERENCE_COLUMNS, "lrrlrl", (reference_cells(each) for each in comparisons(shown)))
    lines += [f"\n*{kind}.* {text}" for kind, text in remarks(shown)]
    lines += ["", "## Growth rates", "", LAWS, ""]
    for each in shown:
        if each.report.laws:
            lines += [f"### {each.experiment.name}: growth rates", ""]
            lines += [*_table(LAW_COLUMNS, "lrrll", map(law_cells, each.report.laws)), ""]
    lines += ["## Figures", ""]
    for each in shown:
        lines += [f"### {each.experiment.name}", "", each.about, ""]
        for chart in each.report.charts:
            lines += [f"![{chart.title}]({figures}{chart.name}.svg)", "", chart.caption, ""]
        lines += [f"*{note}*\n" for note in each.report.notes]
    return "\n".join(lines).rstrip() + "\n"


def _claim(claim: Claim, finding: Finding | None, by: Shown | None) -> list[str]:
    """A line with a fold. It is all HTML: Markdown inside a fold needs an extension that not all renderers have."""
    if finding is None or by is None:
        return _fold(claim.statement, [f"From: {claim.source}."], f" <b>{unseen(claim)}</b>")
    name = escape(by.experiment.name)
    number, what = headline(finding)
    told = f" · {escape(what)}: {escape(number)}" if number else ""
    behind = f' <b>{finding.verdict}</b>{told} · <a href="#{name}">{name}</a>'
    details = [f"Where it holds: {finding.regime}."] if finding.regime else []
    return _fold(claim.statement, [*details, f"Measured: {finding.measured}", f"From: {claim.source}."], behind)


def _fold(summary: str, paragraphs: Iterable[str], behind: str = "") -> list[str]:
    inside = "".join(f"<p>{escape(text, quote=False)}</p>" for text in paragraphs)
    return [f"<details><summary>{escape(summary, quote=False)}{behind}</summary>{inside}</details>"]


def _table(titles: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join({"l": "---", "r": "--:"}[side] for side in sides)
    return [table_row(titles), f"|{rule}|", *map(table_row, rows)]


def table_row(cells: Sequence[str]) -> str:
    """A row of a table.

    >>> table_row(("|entry|", "1"))
    '| \\\\|entry\\\\| | 1 |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
