"""The page of a comparison, from its document alone: the same document gives the same page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis import compare_charts as charts
from curvlens.analysis.differences import error_of, said
from curvlens.analysis.extremes import WIDTH
from curvlens.dynamics.advice import percent, short
from curvlens.report.content import Column, Content, Fold, Link, Mark, Number, Prose, Table, VegaChart, Words
from curvlens.report.heat_map import QUANTITIES, HeatMap
from curvlens.report.page import Page, Section

Document = Mapping[str, Any]
CURVES = 6
"""Most spectra in one picture."""
TITLES = {"numbers": "Side by side", "heat": "Layer × role", "spectrum": "Spectrum", "course": "Course"}
LAYER_QUANTITIES = {
    "trace": ("trace", "the sum of the traces of a layer's blocks"),
    "mean": ("mean curvature", "its trace by its number of parameters: the mean eigenvalue"),
    "top": ("λ_max", "the largest λ_max of a layer's blocks"),
}


def page(content: Document) -> str:
    """The page as HTML."""
    names = _names(content)
    sections = [_says(content), _numbers(content), _heat(content)]
    if len(names) > 2:
        sections.append(_course(content))
    sections.append(_spectra(content))
    return Page(
        f"What changed: {' → '.join(names) if len(names) < 4 else f'{names[0]} → … → {names[-1]}'}",
        sections,
        lead=[Prose(_about(content), "faint")],
        banner=" ".join(content["notes"]),
        provenance={**content["provenance"], "analyses": content["runs"]},
        filtered="blocks",
    ).html()


def _names(content: Document) -> list[str]:
    return [run["name"] for run in content["runs"]]


def _ends(content: Document) -> str:
    names = _names(content)
    return f"{names[-1]} − {names[0]}"


def _about(content: Document) -> str:
    runs = content["runs"]
    models = ", ".join(dict.fromkeys(str(run["model"]) for run in runs))
    return (
        f"{models} · {len(runs)} analyses · {len(content['blocks'])} blocks compared · differences are {_ends(content)}"
    )


def _says(content: Document) -> Section:
    body: list[Content] = []
    for place, each in enumerate(content["sentences"], start=1):
        words: list[Any] = [f"{place}. ", each["text"]]
        if each["panel"] in TITLES:
            words += [" ", Link(f"→ {TITLES[each['panel']].lower()}", each["panel"])]
        body.append(Prose(words))
    lead = "Each sentence is supported by the errors: a difference below 2 σ is no change. Eigenvalues have bounds."
    return Section("start", "What changed", lead, body or [Prose("Nothing was measured in both.", "faint")])


def _numbers(content: Document) -> Section:
    names, last = _names(content), content["differences"][-1]["whole"]
    rows, reasons = [], list[Content]()
    for key, about in content["numbers"].items():
        values = [_number(value, share=key in ("functional_share", "H.negative_share")) for value in about["values"]]
        for place, why in enumerate(about.get("why", ())):
            values[place] = Mark("not known", "faint") if why else values[place]
        reasons += [
            Prose(f"{about['title']} not known: {why}.", "faint") for why in sorted({*about.get("why", ())}) if why
        ]
        rows.append([about["title"], *values, *_change(last.get(key))])
    heads = [*names, f"difference {_ends(content)}" if len(names) > 2 else "difference", "ratio"]
    columns = [Column("quantity"), *(Column(head, numbers=True) for head in heads), Column("verdict")]
    return Section(
        "numbers",
        TITLES["numbers"],
        "Numbers of the whole model.",
        [Table(columns, rows, "numbers of the whole model"), *reasons],
    )


def _change(change: Document | None) -> list[Words]:
    if change is None:
        return ["", "", Mark("not in both", "faint")]
    verdict = (
        Mark("changed", "strong")
        if change["clear"]
        else Mark("not clear" if change["clear"] is False else "error not known", "faint")
    )
    sign = "+" if change["value"] > 0 else ""
    ratio: Words = "" if change["ratio"] is None else Number(short(change["ratio"]), "", change["ratio"])
    return [Number(f"{sign}{short(change['value'])}", _error(change), change["value"]), ratio, verdict]


def _heat(content: Document) -> Section:
    changes, names = content["differences"][-1]["cells"], _names(content)
    more: dict[str, list[tuple[str, str]]] = {block["name"]: [] for block in content["blocks"]}
    rows = []
    for letter, quantities in changes.items():
        for quantity, cells in quantities.items():
            for name, change in cells.items():
                values = content["cells"][letter][quantity][name]
                both = f"{said(values[0])} → {said(values[-1])}"
                more[name].append((f"{QUANTITIES[quantity][0]} of {letter}", both))
                ends = [_number(values[0]), _number(values[-1])]
                rows.append([name, letter, QUANTITIES[quantity][0], *ends, *_change(change)])
    heads = [Column(title, numbers=True) for title in (names[0], names[-1], "difference", "ratio")]
    columns = [Column("block"), Column("of"), Column("quantity"), *heads, Column("verdict")]
    return Section(
        "heat",
        TITLES["heat"],
        f"Differences {_ends(content)}: blue is more, orange is less, grey is within 2 σ. Click a cell for its block.",
        [
            HeatMap(content["blocks"], changes, more, differences=True, lines={}),
            Fold(f"All {len(rows)} differences", [Table(columns, rows, "all differences")], "cells"),
        ],
    )


def _course(content: Document) -> Section:
    names = _names(content)
    shown = {key: about for key, about in content["numbers"].items() if sum(v is not None for v in about["values"]) > 1}
    body: list[Content] = []
    if shown:
        body.append(VegaChart(charts.courses(shown, names), "numbers over the analyses"))
        body.append(Prose("Vertical lines are errors: standard errors, bounds for eigenvalues.", "faint"))
    layers = dict.fromkeys(layer for of in content["layers"].values() for rows in of.values() for layer in rows)
    if layers:
        sizes: dict[str, list[int]] = {}
        for block in content["blocks"]:
            group = sizes.setdefault(block["layer"] or block["name"], [0] * len(names))
            for place, size in enumerate(block["sizes"]):
                group[place] += size
        places = [
            {"name": f"{layer} at {name}", "layer": name, "role": layer, "size": sizes[layer][place]}
            for layer in layers
            for place, name in enumerate(names)
        ]
        cells = {
            letter: {
                quantity: {
                    f"{layer} at {names[i]}": value for layer, row in rows.items() for i, value in enumerate(row)
                }
                for quantity, rows in of.items()
            }
            for letter, of in content["layers"].items()
        }
        body.append(Prose("Layers, and blocks outside of layers, over the analyses."))
        body.append(HeatMap(places, cells, {}, quantities=LAYER_QUANTITIES, lines={}))
    return Section("course", TITLES["course"], f"From {names[0]} to {names[-1]}, in the order given.", body or _none())


def _spectra(content: Document) -> Section:
    names, body = _names(content), list[Content]()
    chosen = _spread(len(names))
    for letter, title in (("H", "Hessian"), ("G", "Gauss–Newton part")):
        found = [
            (names[i], content["spectra"][i]["densities"][letter], content["spectra"][i]["eigenvalues"].get(letter, []))
            for i in chosen
            if letter in content["spectra"][i]["densities"]
        ]
        if not found:
            continue
        body.append(Prose(f"{title} {letter}"))
        body.append(VegaChart(charts.spectra(found), f"spectra of {letter}"))
        body.append(Prose(_left_out(found), "faint"))
    if body and len(chosen) < len(names):
        body.append(Prose(f"Shown are {len(chosen)} of {len(names)} analyses.", "faint"))
    lead = "On a logarithmic axis mirrored at 0. Bands are 95 % intervals; ticks are eigenvalues that were computed."
    return Section("spectrum", TITLES["spectrum"], lead, body or _none())


def _left_out(found: Sequence[tuple[str, Document, Sequence[Document]]]) -> str:
    """What the curves do not show, and what the circles are."""
    middle = ", ".join(f"{percent(density['middle'])} in {name}" for name, density, _ in found)
    circles = [
        f"{'' if atom['exact'] else 'at least '}{percent(atom['value'], error_of(atom) or 0.0)} of all eigenvalues "
        f"are {short(atom['at']) if atom['at'] else '0'} in {name}"
        for name, density, _ in found
        for atom in density["marked"]
    ]
    atoms = f" Circles are atoms: {'; '.join(circles)}, to {short(WIDTH)} of the largest." if circles else ""
    also = ", and the atom at 0" if any(not atom["at"] for _, density, _ in found for atom in density["marked"]) else ""
    return f"Left out of the curves are eigenvalues nearer to 0 than a millionth of the largest{also}: {middle}.{atoms}"


def _spread(runs: int) -> list[int]:
    """Places of at most `CURVES` analyses, the first and the last among them."""
    if runs <= CURVES:
        return list(range(runs))
    return [round(i * (runs - 1) / (CURVES - 1)) for i in range(CURVES)]


def _none() -> Sequence[Content]:
    return [Prose("Not measured in these analyses.", "faint")]


def _number(value: Document | None, *, share: bool = False) -> Words:
    if value is None:
        return ""
    shown = percent(value["value"]) if share else short(value["value"], 4)
    return Number(shown, _error(value, share=share), value["value"])


def _error(value: Document, *, share: bool = False) -> str:
    """The error, unless it is below the digits that are shown."""
    error = error_of(value)
    if not error or error < 5e-5 * abs(value["value"]):
        return ""
    return percent(error) if share else short(error, 2)
