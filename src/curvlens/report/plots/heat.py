"""One estimate for each block: a heat map by layer and role or head, or bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvlens.errors import printable
from curvlens.report.plots.frame import BLUE, CELL, GAP, INK, altair, data
from curvlens.results import ByBlock, Estimate

UNSURE, VERY_UNSURE = 0.25, 0.5
"""Relative errors above which a cell is marked, with a dot or with a stroke."""
OUTSIDE = "outside of layers"


def blocks(result: ByBlock) -> Any:
    """A heat map for blocks of layers, bars for everything else."""
    records = [_record(result, name, estimate) for name, estimate in result.items()]
    if result.by == "head":
        heads = [record for record in records if record["head"] is not None]
        if heads:
            return _heads(result, heads)
    if result.by == "block" and sum(record["layer"] is not None for record in records) > 1:
        return by_layer(printable(result.what), records)
    return _bars(result, records)


def _record(result: ByBlock, name: str, estimate: Estimate) -> dict[str, Any]:
    layer, role, head = result.place(name)
    value, error = float(estimate), float(estimate.stderr)
    known = estimate.measured and math.isfinite(value)
    return {
        "name": printable(name),
        "layer": None if layer is None else printable(layer),
        "role": printable(role),
        "head": head,
        "value": value if known else None,
        "low": value - error,
        "high": value + error,
        "said": printable(str(estimate)),
        "samples": estimate.samples,
        "mark": mark(value if known else None, error),
    }


def mark(value: float | None, error: float) -> str:
    """What stands on a cell: a cross if it was not measured, a stroke or a dot if its error is large."""
    if value is None:
        return "×"
    share = abs(error / value) if value else 0.0
    return "╱" if share > VERY_UNSURE else "·" if share > UNSURE else ""


def _colours(title: str, records: Sequence[dict[str, Any]]) -> Any:
    """On a logarithm for numbers above 0, and mirrored at 0 for those of both signs."""
    alt = altair()
    values = [record["value"] for record in records if record["value"] is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0:
        scale = alt.Scale(type="log", scheme="viridis", reverse=False)
    elif low < 0:
        size = max(abs(low), abs(high))
        least = min((abs(x) for x in values if x), default=1.0)
        # positive is blue, as on all pages
        constant = max(least, size * 1e-4)
        scale = alt.Scale(type="symlog", constant=constant, scheme="blueorange", reverse=True, domain=[-size, size])
    else:
        scale = alt.Scale(type="symlog", constant=max(high * 1e-4, 1e-300), scheme="viridis")
    return alt.Color("value:Q", title=title, scale=scale, legend=alt.Legend(format=".1e", gradientLength=140))


def _cells(records: Sequence[dict[str, Any]], x: Any, y: Any, colour: Any, size: tuple[int, int]) -> Any:
    alt = altair()
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in (("name", "block"), ("said", "value"))]
    tooltip.append(alt.Tooltip("samples:Q", title="samples"))
    base = alt.Chart(data(records)).encode(x=x, y=y, tooltip=tooltip)
    cells = base.mark_rect(stroke=GAP, strokeWidth=1, invalid=None).encode(
        color=alt.condition("isValid(datum.value)", colour, alt.value("#eceff4"))
    )
    marks = base.mark_text(color="white", stroke=INK, strokeWidth=0.3, fontSize=13).encode(text="mark:N")
    return alt.layer(cells, marks).properties(width=CELL * size[0], height=CELL * size[1])


def by_layer(title: str, records: Sequence[dict[str, Any]]) -> Any:
    """Layer × role; what is outside of layers in a column of its own, on the same colours."""
    alt = altair()
    colour = _colours(title, records)
    inside = [record for record in records if record["layer"] is not None]
    outside = [record for record in records if record["layer"] is None]
    layers, roles = ([*dict.fromkeys(record[key] for record in inside)] for key in ("layer", "role"))
    axis = alt.Axis(labelAngle=-45 if len(layers) > 6 else 0, domain=False, ticks=False)
    x = alt.X("layer:N", sort=layers, title=None, axis=axis)
    y = alt.Y("role:N", sort=roles, title=None, axis=alt.Axis(domain=False, ticks=False))
    chart = _cells(inside, x, y, colour, (len(layers), len(roles)))
    if not outside:
        return chart
    for record in outside:
        record["layer"] = OUTSIDE
    y = alt.Y(
        "role:N", sort=[record["role"] for record in outside], title=None, axis=alt.Axis(domain=False, ticks=False)
    )
    beside = _cells(
        outside,
        alt.X("layer:N", title=None, axis=alt.Axis(labels=False, ticks=False, domain=False)),
        y,
        colour,
        (1, len(outside)),
    )
    return alt.hconcat(chart, beside).resolve_scale(color="shared")


def _heads(result: ByBlock, records: Sequence[dict[str, Any]]) -> Any:
    """Layer × head, a picture for each role."""
    alt = altair()
    colour = _colours(printable(result.what), records)
    layers = [*dict.fromkeys(record["layer"] for record in records)]
    charts = []
    for role in dict.fromkeys(record["role"] for record in records):
        own = [record for record in records if record["role"] == role]
        heads = sorted({record["head"] for record in own})
        x = alt.X("layer:N", sort=layers, title=None, axis=alt.Axis(labelAngle=-45, domain=False, ticks=False))
        y = alt.Y("head:O", title="head", axis=alt.Axis(domain=False, ticks=False))
        charts.append(_cells(own, x, y, colour, (len(layers), len(heads))).properties(title=role))
    return alt.concat(*charts, columns=4).resolve_scale(color="shared")


def _bars(result: ByBlock, records: Sequence[dict[str, Any]]) -> Any:
    alt = altair()
    y = alt.Y("name:N", sort=[record["name"] for record in records], title=None)
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip("said:N", title=printable(result.what))]
    base = alt.Chart(data(records)).encode(y=y, tooltip=tooltip)
    bars = base.mark_bar(color=BLUE, height={"band": 0.7}).encode(x=alt.X("value:Q", title=printable(result.what)))
    return alt.layer(bars, base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")).properties(width=420)
