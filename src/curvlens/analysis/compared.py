"""Analyses side by side as one plain document: their numbers, and the differences from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis.compare_spectra import spectra
from curvlens.analysis.differences import difference, error_of, exactly, number, quotient, rounding_of
from curvlens.errors import listing

Document = Mapping[str, Any]
SCHEMA = 1
WHOLE = {
    "top": "λ_max of {}", "bottom": "λ_min of {}", "trace": "trace of {}", "norm": "Frobenius norm of {}",
    "negative_share": "negative share of Σ|λ| of {}", "effective_rank": "effective rank (Σ|λ|)²/Σλ² of {}",
    "stable_rank": "stable rank ‖·‖²_F/‖·‖²₂ of {}",
}  # fmt: skip
CELLS = ("trace", "norm", "top", "bottom", "mean")
FACTS = {"loss_name": "loss function", "dtype": "dtype", "parameters": "number of parameters", "family": "architecture"}


def compared(
    documents: Sequence[Document], names: Sequence[str], identities: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """What the analyses share, and how it differs. What was not measured in one of two has no difference."""
    blocks = _shared_blocks(documents)
    rounding = rounding_of([str(document.get("dtype")) for document in documents])
    numbers, cells = _numbers(documents), _cells(documents, [block["name"] for block in blocks])
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "comparison",
        "rounding": rounding,
        "runs": [_run(document, name) for document, name in zip(documents, names, strict=True)],
        "notes": _notes(documents, names, identities, blocks),
        "blocks": blocks,
        "numbers": numbers,
        "cells": cells,
        "layers": _layers(blocks, cells, len(documents)),
        "differences": [],
        "spectra": [spectra(document) for document in documents],
    }
    for place in range(1, len(documents)):
        whole = {
            key: difference(about["values"][0], about["values"][place], rounding)
            for key, about in numbers.items()
            if about["values"][0] is not None and about["values"][place] is not None
        }
        changes = {
            letter: {quantity: _changes(of, place, rounding) for quantity, of in quantities.items()}
            for letter, quantities in cells.items()
        }
        found["differences"].append({"from": names[0], "to": names[place], "whole": whole, "cells": changes})
    return found


def _changes(cells: Mapping[str, Sequence[Any]], place: int, rounding: float) -> dict[str, Any]:
    return {
        name: difference(values[0], values[place], rounding)
        for name, values in cells.items()
        if values[0] is not None and values[place] is not None
    }


def _run(document: Document, name: str) -> dict[str, Any]:
    about = {"model": document.get("name"), **{key: document.get(key) for key in FACTS}, "seed": document.get("seed")}
    about |= {"tokens": _mapping(document, "point").get("tokens"), "budget": document.get("budget")}
    return {"name": name} | {key: value if isinstance(value, int) else str(value) for key, value in about.items()}


def _notes(
    documents: Sequence[Document],
    names: Sequence[str],
    identities: Sequence[Mapping[str, str]],
    blocks: Sequence[Document],
) -> list[str]:
    """What makes the analyses hard to compare."""
    notes = []
    data = [identity.get("data") for identity in identities]
    tokens = [_mapping(document, "point").get("tokens") for document in documents]
    if len(set(filter(None, data))) > 1 or len({str(each) for each in tokens if each is not None}) > 1:
        notes.append("The analyses have different data: a difference may be one of the data, not of the model.")
    elif None in data:
        without = [name for name, each in zip(names, data, strict=True) if each is None]
        notes.append(
            f"Whether the data are the same is not known: there is no readable study.json beside {listing(without)}."
        )
    for key, title in FACTS.items():
        values = [str(document.get(key)) for document in documents]
        if len(set(values)) > 1:
            said = "; ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            notes.append(f"The analyses differ in the {title} ({said}).")
    models = [identity.get("model") for identity in identities]
    if None not in models and len(set(models)) == 1:
        notes.append("All analyses have the same weights: no difference is one of the model.")
    all_names = dict.fromkeys(block["name"] for document in documents for block in document["blocks"])
    if len(all_names) > len(blocks):
        shared = {block["name"] for block in blocks}
        missing = [name for name in all_names if name not in shared]
        notes.append(f"{len(blocks)} of {len(all_names)} blocks are in all analyses. Not compared: {listing(missing)}.")
    resized = [block["name"] for block in blocks if len(set(block["sizes"])) > 1]
    if resized:
        notes.append(
            f"{len(resized)} blocks have another number of parameters: {listing(resized)}. See their mean curvature."
        )
    return notes


def _shared_blocks(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Blocks of the first analysis that all have."""
    sizes = [{block["name"]: block["size"] for block in document["blocks"]} for document in documents]
    return [
        {
            **{key: block[key] for key in ("name", "layer", "role", "size")},
            "sizes": [each[block["name"]] for each in sizes],
        }
        for block in documents[0]["blocks"]
        if all(block["name"] in each for each in sizes)
    ]


def _numbers(documents: Sequence[Document]) -> dict[str, dict[str, Any]]:
    """Numbers of the whole model, a value for each analysis, those that any has."""
    found: dict[str, dict[str, Any]] = {}

    def add(
        key: str, title: str, letter: str, quantity: str, values: list[dict[str, Any] | None], whys: Sequence[str] = ()
    ) -> None:
        if any(value is not None for value in values) or any(whys):
            found[key] = {"title": title, "operator": letter, "quantity": quantity, "values": values}
        if any(whys):
            found[key]["why"] = list(whys)

    points, wholes = ([_mapping(document, key) for document in documents] for key in ("point", "whole"))
    add("loss", "loss", "", "loss", [exactly(point.get("loss")) for point in points])
    add(
        "gradient_norm", "gradient norm", "", "gradient_norm", [exactly(point.get("gradient_norm")) for point in points]
    )
    for quantity, title in WHOLE.items():
        for letter in "HGF":
            if (letter, quantity) in {("G", "bottom"), ("G", "negative_share")}:
                continue  # G has no negative eigenvalues
            values = [number(_mapping(whole, letter).get(quantity)) for whole in wholes]
            add(f"{letter}.{quantity}", title.format(letter), letter, quantity, values)
        if quantity == "norm":
            shares = [_functional_share(whole) for whole in wholes]
            add("functional_share", "functional share tr F / tr G", "F", "functional_share", shares)
    noises = [_mapping(_mapping(document, "noise"), "scale") for document in documents]
    scales, whys = [number(each) for each in noises], [_why(each) for each in noises]
    add("noise_scale", "gradient noise scale, in samples", "", "noise_scale", scales, whys)
    return found


def _why(found: Document) -> str:
    """Why a number is not known although it was measured; empty if it is, or if it was not."""
    why = found.get("why")
    return why if found.get("value") is None and isinstance(why, str) else ""


def _functional_share(whole: Document) -> dict[str, Any] | None:
    """tr F / tr G: from the trace of F itself or from H − G, whichever is more accurate."""
    h, g, f = (number(_mapping(whole, letter).get("trace")) for letter in "HGF")
    if g is None:
        return None
    ways = [quotient(f, g) if f is not None else None, quotient(h, g, -1.0) if h is not None else None]
    return min(filter(None, ways), key=lambda way: way["stderr"], default=None)


def _cells(documents: Sequence[Document], names: Sequence[str]) -> dict[str, dict[str, dict[str, list[Any]]]]:
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for letter in "HGF":
        for quantity in CELLS:
            tables = [_mapping(_mapping(document["cells"], letter), quantity) for document in documents]
            rows = {name: [number(table.get(name)) for table in tables] for name in names}
            rows = {name: values for name, values in rows.items() if any(value is not None for value in values)}
            if rows:
                found.setdefault(letter, {})[quantity] = rows
    return found


def _layers(blocks: Sequence[Document], cells: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """By layer, or block outside of layers: trace, mean curvature and the largest λ_max of its blocks, by analysis."""
    groups: dict[str, list[Document]] = {}
    for block in blocks:
        groups.setdefault(block["layer"] or block["name"], []).append(block)
    found: dict[str, Any] = {}
    for letter, quantities in cells.items():
        for quantity in ("trace", "top"):
            if quantity not in quantities:
                continue
            table = quantities[quantity]
            for layer, members in groups.items():
                for run in range(runs):
                    parts = [table.get(block["name"], [None] * runs)[run] for block in members]
                    if None in parts:
                        continue
                    _place(found, letter, quantity, layer, runs)[run] = (
                        _total(parts, letter) if quantity == "trace" else max(parts, key=lambda part: part["value"])
                    )
                    if quantity == "trace":
                        size = sum(block["sizes"][run] for block in members)
                        _place(found, letter, "mean", layer, runs)[run] = _scaled(_total(parts, letter), size)
    return found


def _place(found: dict[str, Any], letter: str, quantity: str, layer: str, runs: int) -> list[Any]:
    rows: dict[str, list[Any]] = found.setdefault(letter, {}).setdefault(quantity, {})
    return rows.setdefault(layer, [None] * runs)


def _total(parts: Sequence[Document], letter: str) -> dict[str, Any]:
    """The sum of traces. Blocks of G come from the same passes: their errors add up."""
    errors = [error_of(part) for part in parts]
    value = sum(part["value"] for part in parts)
    known = [error for error in errors if error is not None]
    stderr = None if len(known) < len(errors) else sum(known) if letter == "G" else math.hypot(*known)
    ends = {"low": None, "high": None} if stderr is None else {"low": value - 2 * stderr, "high": value + 2 * stderr}
    return {"value": value, "stderr": stderr, **ends, "exact": stderr == 0.0}


def _scaled(found: dict[str, Any], size: int) -> dict[str, Any]:
    numbers = {
        key: None if found[key] is None else found[key] / max(size, 1) for key in ("value", "stderr", "low", "high")
    }
    return numbers | {"exact": found["exact"]}


def _mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}
