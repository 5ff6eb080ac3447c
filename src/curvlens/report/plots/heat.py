"""One estimate for each block: a heat map by layer and role or head, or bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import CELL, GAP, INK, SIGNED, altair, as_key, colour_of, data, labels, titled
from curvlens.results import Attribution, ByBlock, Estimate

UNSURE, VERY_UNSURE = 0.25, 0.5
"""Relative errors above which a cell is marked, with a dot or with a stroke."""
LEAST_TICKS = 3
MARKS = {
    "·": f"dot: error above {100 * UNSURE:g} %",
    "╱": f"stroke: error above {100 * VERY_UNSURE:g} %",
    "×": "cross: not measured, or not known",
}
OUTSIDE = "outside of layers"
UNNAMED = [
    "The architecture is not known, so there is no heat map.",
    "Name its layers: cl.doctor(problem) has the line to type.",
]
MOST_BARS = 500
"""The most bars: those of the largest sizes. A picture of more cannot be read."""
MOST_MODULES = 12
"""The same for modules: beside the largest parts all others are too short to be seen."""


def blocks(result: ByBlock) -> Any:
    """A heat map for blocks of layers, bars for everything else."""
    records = [_record(result, name, estimate) for name, estimate in result.items()]
    heads = [record for record in records if record["head"] is not None] if result.by == "head" else []
    provenance = next((estimate.provenance for estimate in result.values()), {})
    caption = [said for mark, said in MARKS.items() if any(record["mark"] == mark for record in records)]
    if heads:
        chart = _heads(result, heads)
    elif result.by == "block" and sum(record["layer"] is not None for record in records) > 1:
        chart = by_layer(printable(result.what), records)
    else:
        chart, caption = _bars(result, records), UNNAMED if result.by == "block" and _unnamed(result) else []
    return titled(chart, printable(result.what), provenance, caption)


def attribution(result: Attribution, what: str = "blocks") -> Any:
    """uᵀHu by block; ``what="modules"``: by the own code of each module; ``what="pairs"``: by pair of blocks."""
    if what not in ("blocks", "modules", "pairs"):
        raise CurvlensError(f"what={what!r}, expected 'blocks', 'modules' or 'pairs'.")
    if what == "blocks":
        return blocks(result.blocks)
    alt = altair()
    if what == "modules":
        rows = result.module_table()  # the largest first
        records = [{**row, "key": as_key(printable(row["module"]))} for row in rows[:MOST_MODULES]]
        y = alt.Y("key:N", sort=None, title=None, axis=labels())
        bars = alt.Chart(data(records)).mark_bar(color=INK, opacity=0.6, height={"band": 0.7})
        x = alt.X("part:Q", title="uᵀGu, and uᵀM_m u of the own code of each module")
        chart = bars.encode(y=y, x=x).properties(width=420)
        more = len(rows) > MOST_MODULES
        return chart.properties(title=f"the {MOST_MODULES} largest of {len(rows)}") if more else chart
    records = [
        {**row, "row": as_key(printable(row["block"])), "column": as_key(printable(row["with"])), "value": row["part"]}
        for row in result.pair_table()
    ]
    axis = labels(domain=False, ticks=False)
    return (
        alt.Chart(data(records))
        .mark_rect(stroke=GAP, strokeWidth=1)
        .encode(
            x=alt.X("column:N", sort=None, title=None, axis=labels(labelAngle=-90, domain=False, ticks=False)),
            y=alt.Y("row:N", sort=None, title=None, axis=axis),
            color=_colours("u_aᵀ H u_b", records),
            tooltip=["block:N", "with:N", "part:Q"],
        )
        .properties(width={"step": CELL}, height={"step": CELL})
    )


def _unnamed(result: ByBlock) -> bool:
    """Whether these are blocks of a model whose architecture is not known."""
    said = [estimate.provenance for estimate in result.values()]
    return bool(said) and all("n_tokens" in about and about.get("family", "") is None for about in said)


def _record(result: ByBlock, name: str, estimate: Estimate) -> dict[str, Any]:
    layer, role, head = result.place(name)
    value, error = float(estimate), float(estimate.stderr)
    known = estimate.measured and math.isfinite(value)
    return {
        "name": printable(name),
        "layer": None if layer is None else printable(layer),
        "role": printable(role),
        "column": as_key(OUTSIDE if layer is None else printable(layer)),
        "row": as_key(printable(role)),
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
        scale = alt.Scale(type="symlog", constant=max(least, size * 1e-4), domain=[-size, size], **SIGNED)
    else:
        scale = alt.Scale(type="symlog", constant=max(high * 1e-4, 1e-300), scheme="viridis")
    legend = alt.Legend(format=".4~g", gradientLength=140, values=ticks(low, high))
    return alt.Color("value:Q", title=title, scale=scale, legend=legend)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers for a legend from low to high, three at least unless all values are equal.

    >>> ticks(0.02, 150.0), ticks(3.0, 40.0), ticks(-3.0, 1.0), ticks(0.0, 5.0)
    ([0.1, 1.0, 10.0, 100.0], [5.0, 10.0, 20.0], [-2.0, 0.0, 2.0], [0.0, 0.5, 5.0])
    """
    size = max(abs(low), abs(high))
    if not size or low == high:
        return [low]
    if low <= 0:
        top = max(tick for tick in _steps(size / 10, size) if tick <= size)
        return [-top, 0.0, top] if low < 0 else [0.0, top / 10, top]
    for steps in ((1,), (1, 2, 5)):
        inside = [tick for tick in _steps(low, high, steps) if low <= tick <= high]
        if len(inside) >= LEAST_TICKS:
            return inside[:: 1 + len(inside) // 8]
    return [low, math.sqrt(low) * math.sqrt(high), high]


def _steps(low: float, high: float, steps: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Powers of ten times some digits, around an interval."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{step}e{power}") for power in powers for step in steps]


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
    records = [
        {**record, "column": as_key(record["layer"] or OUTSIDE), "row": as_key(record["role"])} for record in records
    ]
    inside = [record for record in records if record["layer"] is not None]
    outside = [record for record in records if record["layer"] is None]
    layers, roles = ([*dict.fromkeys(record[key] for record in inside)] for key in ("layer", "role"))
    axis = labels(labelAngle=-45 if len(layers) > 6 else 0, domain=False, ticks=False)
    x = alt.X("column:N", sort=None, title=None, axis=axis)  # in the order of the records
    y = alt.Y("row:N", sort=None, title=None, axis=labels(domain=False, ticks=False))
    chart = _cells(inside, x, y, colour, (len(layers), len(roles)))
    if not outside:
        return chart
    for record in outside:
        record["layer"] = OUTSIDE
    y = alt.Y("row:N", sort=None, title=None, axis=labels(domain=False, ticks=False))
    beside = _cells(
        outside,
        alt.X("column:N", title=None, axis=alt.Axis(labels=False, ticks=False, domain=False)),
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
        x = alt.X("column:N", sort=None, title=None, axis=labels(labelAngle=-45, domain=False, ticks=False))
        y = alt.Y("head:O", title="head", axis=alt.Axis(domain=False, ticks=False))
        charts.append(_cells(own, x, y, colour, (len(layers), len(heads))).properties(title=role))
    return alt.concat(*charts, columns=4).resolve_scale(color="shared")


def _bars(result: ByBlock, records: Sequence[dict[str, Any]]) -> Any:
    alt = altair()
    shown, note = records, ""
    if len(records) > MOST_BARS:
        places = sorted(range(len(records)), key=lambda i: -abs(records[i]["value"] or 0.0))[:MOST_BARS]
        shown = [records[i] for i in sorted(places)]
        note = f"the {MOST_BARS} largest of {len(records)}"
    shown = [{**record, "key": as_key(record["name"])} for record in shown]
    y = alt.Y("key:N", sort=None, title=None, axis=labels())
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip("said:N", title=printable(result.what))]
    base = alt.Chart(data(shown)).encode(y=y, tooltip=tooltip)
    colour = colour_of(next((estimate.provenance for estimate in result.values()), {}))
    bars = base.mark_bar(color=colour, opacity=0.6, height={"band": 0.7}).encode(
        x=alt.X("value:Q", title=printable(result.what))
    )
    chart = alt.layer(bars, base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")).properties(width=420)
    return chart.properties(title=note) if note else chart
