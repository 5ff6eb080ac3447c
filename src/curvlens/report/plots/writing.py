"""A chart as the content of a file: vector, pixels, one page, or the specification."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.content import Column, Fold, Number, Prose, Table, VegaChart
from curvlens.report.page import Page, Section
from curvlens.results import ByBlock, Density, Eigs, Propagation, Result, Solution

KINDS = ("svg", "png", "pdf", "html", "json")
MOST_ROWS = 2000
"""Of the table below a chart."""


def content(chart: Any, kind: str, result: Result) -> str | bytes:
    """What the file of a kind holds. It is made in memory, so that a file is written as a whole or not at all."""
    try:
        import vl_convert
    except ImportError as error:
        raise CurvlensError("Pictures need vl-convert. Install it: pip install 'curvlens[report]'.") from error
    spec = chart.to_dict(validate=False)
    made: dict[str, Callable[[], str | bytes]] = {
        "svg": lambda: vl_convert.vegalite_to_svg(spec),
        "png": lambda: vl_convert.vegalite_to_png(spec, scale=2),
        "pdf": lambda: vl_convert.vegalite_to_pdf(spec),
        "html": lambda: page(spec, result),
        "json": lambda: json.dumps(spec, indent=1) + "\n",
    }
    return made[kind]()


def page(spec: dict[str, Any], result: Result) -> str:
    """One page with the chart, its numbers and their provenance."""
    title = _title(result)
    records = result.table()
    shown = "All numbers" if len(records) <= MOST_ROWS else f"The first {MOST_ROWS} of {len(records)} numbers"
    numbers = Fold(shown, [_table(records[:MOST_ROWS])], "numbers")
    return Page(
        title,
        [Section("chart", "Chart", body=[VegaChart(spec, title), numbers])],
        lead=[Prose(printable(repr(result).split("\n")[0]), "faint")],
        banner=f"note: {printable(note)}" if (note := getattr(result, "note", "")) else "",
        provenance=getattr(result, "provenance", {}),
    ).html()


def _title(result: Result) -> str:
    if isinstance(result, ByBlock):
        return printable(f"{result.what} by {result.by}")
    return {
        Density: "Spectral density",
        Eigs: "Eigenvalues",
        Propagation: "Curvature along depth",
        Solution: "Residual of a solution",
    }.get(type(result), type(result).__name__)


def _table(records: Sequence[dict[str, Any]]) -> Table:
    """Flat records, a column for each key."""
    keys = list(records[0]) if records else []
    numeric = {key: any(_is_number(record[key]) for record in records) for key in keys}
    return Table([Column(key, numeric[key]) for key in keys], [[_cell(r[key]) for key in keys] for r in records])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> Number | str:
    if value is None:
        return ""
    return Number(f"{value:.4g}".replace("-", "−"), value=value) if isinstance(value, float) else printable(str(value))
