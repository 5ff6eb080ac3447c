"""A heat map of layer × role: switches for operator and quantity, and a drawer for each block. A content of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from curvlens.errors import printable
from curvlens.report.assets import Assets
from curvlens.report.drawer import Part, Shared

QUANTITIES = {
    "trace": ("trace", "the sum of the eigenvalues of a block"),
    "norm": ("Frobenius norm", "the root of the sum of the squares of its eigenvalues"),
    "top": ("λ_max", "its largest eigenvalue"),
    "bottom": ("λ_min", "its smallest eigenvalue"),
    "mean": ("mean curvature", "its trace by its number of parameters: the mean eigenvalue"),
}
OPERATORS = {"H": "Hessian", "G": "Gauss–Newton part", "F": "functional part, H − G"}
LINES = {
    ("H", "trace"): 'cl.trace(cl.hessian(problem)["{}"])',
    ("G", "trace"): 'cl.trace(cl.ggn(problem)["{}"])',
    ("F", "trace"): 'cl.trace(cl.functional(problem)["{}"])',
    ("H", "norm"): 'cl.frobenius(cl.hessian(problem)["{}"])',
    ("G", "norm"): 'cl.frobenius(cl.ggn(problem)["{}"])',
    ("F", "norm"): 'cl.frobenius(cl.functional(problem)["{}"])',
    ("H", "mean"): 'cl.trace(cl.hessian(problem)["{}"]) / {size}',
    ("G", "mean"): 'cl.trace(cl.ggn(problem)["{}"]) / {size}',
    ("F", "mean"): 'cl.trace(cl.functional(problem)["{}"]) / {size}',
    ("H", "top"): 'cl.eigs(cl.hessian(problem)["{}"])',
    ("G", "top"): 'cl.eigs(cl.ggn(problem)["{}"])',
    ("H", "bottom"): 'cl.eigs(cl.hessian(problem)["{}"], ends="smallest")',
}
"""The line of Python that gives each number: "{}" is the name of the block, {size} its number of parameters."""


@dataclass(frozen=True)
class HeatMap:
    """``blocks`` have a name, a layer (or None) and a role; ``cells`` a number for each, by operator and quantity.

    ``more`` has lines of text for the drawer of a block, label and value; ``parts`` what is drawn below them.
    ``differences`` are shown in colours of both signs, and grey where ``clear`` of a cell is not true. ``quantities``
    have a title and an explanation.
    """

    blocks: Sequence[Mapping[str, Any]]
    cells: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
    more: Mapping[str, Sequence[tuple[str, str]]]
    differences: bool = False
    quantities: Mapping[str, tuple[str, str]] = field(default_factory=lambda: QUANTITIES)
    lines: Mapping[tuple[str, str], str] = field(default_factory=lambda: LINES)
    parts: Mapping[str, Sequence[Part]] = field(default_factory=dict)

    def html(self, assets: Assets) -> str:
        """The places that the script fills."""
        assets.needs("heat_map.css", "drawer.css", "drawer.js", "heat_map.js")
        numbers = {
            letter: {
                quantity: [_cell(cells.get(block["name"])) for block in self.blocks]
                for quantity, cells in found.items()
            }
            for letter, found in self.cells.items()
        }
        shared = Shared()
        blocks = [
            {
                "name": printable(block["name"]),
                "layer": None if block["layer"] is None else printable(block["layer"]),
                "role": printable(block["role"]),
                "size": block["size"],
                "more": [[printable(label), printable(value)] for label, value in self.more.get(block["name"], ())],
                "parts": [part.data(shared) for part in self.parts.get(block["name"], ())],
            }
            for block in self.blocks
        ]
        lines = {f"{letter} {quantity}": line for (letter, quantity), line in self.lines.items()}
        about = {"quantities": dict(self.quantities), "operators": OPERATORS, "lines": lines, "shared": shared.values}
        place = assets.keep("heats", {"blocks": blocks, "cells": numbers, **about, "differences": self.differences})
        return f"""<div class="heat" data-heat="{place}">
<div class="bar"><div class="choice letters" role="group" aria-label="operator"></div>
<div class="choice quantities" role="group" aria-label="quantity"></div></div>
<p class="words faint" aria-live="polite"></p>
<noscript><p class="warn">The map is drawn by a script; the table below has all numbers.</p></noscript>
<div class="map" role="group" aria-label="heat map: arrow keys move, Enter opens a block"></div>
<div class="legend"></div>
<div class="drawer" aria-live="polite"></div>
</div>
"""


def _cell(cell: Mapping[str, Any] | None) -> list[Any] | None:
    """Value, error, samples; 1 or 0 for whether it is exact, is clear."""
    if cell is None or cell.get("value") is None:
        return None
    error = cell["bound"] if "bound" in cell else cell.get("stderr")
    return [
        _short(cell["value"]), _short(error, 3), cell.get("samples"),
        int(cell["exact"]), int(cell.get("clear") is True),
    ]  # fmt: skip


def _short(number: float | None, digits: int = 6) -> float | None:
    """Six digits, three of an error: enough for a picture, a third of the bytes."""
    return None if number is None else float(f"{number:.{digits}g}")
