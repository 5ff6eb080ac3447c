"""The charts of the page as files: the same specifications, as vectors and as pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.analysis import charts, panels
from curvlens.analysis.numbers import said
from curvlens.dynamics.advice import BEYOND
from curvlens.report.assets import vega
from curvlens.report.heat_map import QUANTITIES
from curvlens.report.plots.frame import styled
from curvlens.report.plots.heat import by_layer, mark

Document = Mapping[str, Any]
WIDTH = 700
"""Pixels of a chart that takes the width of the page."""
HEATS = ("trace", "norm")
"""Quantities whose heat maps are written: the others are on the page."""


def write(content: Document, folder: Path) -> list[Path]:
    """Write all figures, each as ``.svg`` and ``.png``. Without the packages of ``curvlens[report]`` there are none."""
    if not charts.available():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, spec in figures(content):
        svg, png = drawn(spec)
        written.append(files.write(folder / f"{name}.svg", svg))
        written.append(files.write(folder / f"{name}.png", png))
    return written


def drawn(spec: charts.Spec) -> tuple[str, bytes]:
    """A chart as vectors and as pixels."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(spec)
    return svg, vl_convert.svg_to_png(svg, scale=2)


def prepare() -> None:
    """Load what draws, which takes seconds, and draw once."""
    vega()
    drawn(heat({"cells": {"H": {"trace": {}}}, "blocks": []}, "H", "trace"))


def figures(content: Document) -> Iterator[tuple[str, charts.Spec]]:
    """Name and specification of each figure."""
    for letter, found in content["cells"].items():
        for quantity in HEATS:
            if quantity in found:
                yield f"heat-{letter}-{quantity}", heat(content, letter, quantity)
    with suppress(*BEYOND):  # the section of the page says why
        for name, spec in panels.specs(content):
            yield name, _sized(spec)


def heat(content: Document, letter: str, quantity: str) -> charts.Spec:
    """The heat map of one operator and quantity."""
    cells = content["cells"][letter][quantity]
    records = [_record(block, cells.get(block["name"])) for block in content["blocks"]]
    spec: charts.Spec = styled(by_layer(f"{QUANTITIES[quantity][0]} of {letter}", records)).to_dict(validate=False)
    return spec


def _record(block: Document, cell: Document | None) -> dict[str, Any]:
    value = cell["value"] if cell else None
    known = cell is not None and value is not None and math.isfinite(value)
    error = 0.0 if not known or cell is None or cell["exact"] else cell.get("bound", cell.get("stderr")) or 0.0
    return {
        "name": charts.name(block["name"]),
        "layer": None if block["layer"] is None else charts.name(block["layer"]),
        "role": charts.name(block["role"]),
        "value": value if known else None,
        "said": said(cell) if known and cell is not None else "not measured",
        "samples": cell.get("samples") if cell else None,
        "mark": mark(value if known else None, error),
    }


def _sized(spec: charts.Spec) -> charts.Spec:
    """No page gives a width here."""
    if "vconcat" in spec:
        return {**spec, "vconcat": [_sized(each) for each in spec["vconcat"]]}
    if spec.get("width") != "container":
        return spec
    return {**spec, "width": min(WIDTH, spec.get("usermeta", {}).get("widest", WIDTH))}
