"""The page of an analysis, from its document alone: the same document gives the same page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis import charts, drawer, panels
from curvlens.analysis.numbers import number, said
from curvlens.dynamics.advice import clearly_higher, percent, short
from curvlens.report.content import Column, Content, Fold, Link, Mark, Prose, Table, Words
from curvlens.report.heat_map import OPERATORS, QUANTITIES, HeatMap
from curvlens.report.page import Page, Section
from curvlens.study.budget import readable_time

Document = Mapping[str, Any]
ENDED = {
    "interrupted": "This analysis was interrupted: it shows what was done by then.",
    "planned": "This analysis was planned and not run.",
}

SAID = {"holds when": "holds in part"}
"""Verdicts whose words would go on."""


def page(content: Document) -> str:
    """The page as HTML. Without the packages of ``curvlens[report]`` it has no charts, and says so."""
    sections = [_heat(content), *panels.panels(content)]
    titles = {section.id: section.title for section in sections}
    bad = [each["text"] for each in content["sentences"] if each["tone"] == "bad"]
    return Page(
        f"Curvature of {content['name']}",
        [_says(content, titles), *sections],
        lead=_lead(content),
        banner=" ".join([*bad, *([ENDED[content["ended"]]] if content["ended"] in ENDED else [])]),
        provenance={**content["provenance"], "seed": content["seed"], "loss": content["loss_name"]},
        filtered="blocks",
    ).html()


def _lead(content: Document) -> list[Content]:
    """Three lines: what was measured, the numbers of the whole, and what to know before trusting them."""
    facts = [f"{content['parameters']:,} parameters", f"{content['dtype']} on {content['device']}"]
    if "tokens" in content.get("point", {}):
        facts.insert(1, f"{content['point']['tokens']:,} tokens")
    facts.append(f"{readable_time(sum(c['seconds'] for c in content['cost']))} of work, budget {content['budget']}")
    lines = [Prose(" · ".join(facts), "faint")]
    lines += [Prose(words) for words in (_numbers(content), _health(content)) if words]
    if not charts.available():
        note = "This page has no charts: their packages are not installed. Run "
        lines.append(
            Prose([Mark(note, "warn"), Mark("pip install 'curvlens[report]'", "code"), " and write it again."])
        )
    return list(lines)


def _numbers(content: Document) -> list[str | Mark]:
    point, sanity, whole = content.get("point", {}), content.get("sanity", {}), content["whole"].get("H", {})
    found: list[str | Mark] = []
    if "loss" in point:
        found.append(f"loss {short(point['loss'])}")
        twin = sanity.get("shuffled_loss")
        if twin is not None:
            good = clearly_higher(twin, point["loss"])
            judged = "✓" if good else "✗ not clearly higher"
            found.append(Mark(f" (shuffled input {short(twin)} {judged})", "good" if good else "bad"))
        if sanity.get("accuracy") is not None:
            found.append(f" · accuracy {percent(sanity['accuracy'])}")
    named = (("top", "sharpness λ_max"), ("bottom", "λ_min"), ("trace", "tr H"))
    for name, title in named:
        if whole.get(name):
            found.append(f"{' · ' if found else ''}{title} {said(whole[name])}")
    return found


def _health(content: Document) -> list[str | Mark]:
    findings, words = content.get("doctor"), list[str | Mark]()
    if findings is not None:
        errors = sum(each["severity"] == "error" for each in findings)
        notes = len(findings) - errors
        count = f"{errors or 'no'} error{'s' * (errors != 1)}, {notes or 'no'} note{'s' * (notes != 1)}"
        words += [Mark("● ", "bad" if errors else "good"), f"doctor: {count}"]
    tables = [(letter, name) for letter, found in content["cells"].items() for name in found]
    all_cells = len(content["blocks"]) * len(tables)
    missing = all_cells - sum(len(content["cells"][letter][name]) for letter, name in tables)
    if missing:
        words += [
            " · " if words else "",
            Mark("◐ ", "warn"),
            f"{missing:,} of {all_cells:,} cells not measured in this budget",
        ]
    return words


def _says(content: Document, titles: Mapping[str, str]) -> Section:
    body: list[Content] = []
    for place, each in enumerate(content["sentences"], start=1):
        words: list[str | Mark | Link] = [Mark(f"{place}  ", "faint")]
        words.append(Mark(each["text"], each["tone"]) if each["tone"] else each["text"])
        if each["panel"] in titles:
            words += ["  ", Link(f"→ {titles[each['panel']].lower()}", each["panel"])]
        body.append(Prose(words))
    findings = content.get("doctor") or ()
    if findings:
        rows: list[list[Words]] = [[f[key] for key in ("name", "severity", "what", "effect", "fix")] for f in findings]
        columns = [Column(title) for title in ("finding", "severity", "what", "effect", "fix")]
        body.append(Fold("What the doctor found", [Table(columns, rows, "findings", filtered=False)], "doctor"))
    advice = content.get("advice") or ()
    if advice:
        body.append(Fold("What the literature would recommend", _advice(advice, titles), "advice"))
    lead = "Each sentence is a rule over measured numbers. Errors are standard errors; those of eigenvalues are bounds."
    return Section("start", "What this says", lead, body)


def _advice(advice: Sequence[Document], titles: Mapping[str, str]) -> list[Content]:
    """The table of observations and recommendations, with the verdict that supports or refutes each."""
    rows: list[list[Words]] = []
    for each in advice:
        given = [each["recommendation"]] if each["recommendation"] else [Mark("no advice", "faint")]
        shown: list[str | Mark | Link] = [each["observation"]]
        if each["panel"] in titles:
            shown += [" ", Link(f"→ {titles[each['panel']].lower()}", each["panel"])]
        rows.append(
            [
                shown,
                [*given, Mark(f" ({each['reason']})", "faint")],
                f"{each['claim']}: {SAID.get(each['verdict'], each['verdict'])}",
            ]
        )
    words = (
        "Recommendations for what is observed, and whether small models bear them out: a verdict is that of a measured "
        "claim, by its name on curvlens' page of verdicts."
    )
    columns = [Column(title) for title in ("observed", "recommended", "verdict")]
    return [Prose(words, "faint"), Table(columns, rows, "advice", filtered=False)]


def _heat(content: Document) -> Section:
    cells = content["cells"]
    found = [(quantity, letter) for quantity in QUANTITIES for letter in OPERATORS if quantity in cells.get(letter, {})]
    columns = [Column("block"), *(Column(letter, numbers=True, group=QUANTITIES[name][0]) for name, letter in found)]
    rows: list[list[Words]] = [
        [block["name"], *(number(cells[letter][quantity].get(block["name"])) for quantity, letter in found)]
        for block in content["blocks"]
    ]
    more = {block["name"]: drawer.facts(content, block) for block in content["blocks"]}
    return Section(
        "heat",
        "Layer × role",
        "Where the curvature sits. Choose an operator and a quantity; click a cell for all numbers of its block.",
        [
            HeatMap(content["blocks"], cells, more, parts=drawer.parts(content)),
            Fold(f"All numbers of {len(rows)} blocks", [Table(columns, rows, "all cells")], "cells"),
        ],
    )
