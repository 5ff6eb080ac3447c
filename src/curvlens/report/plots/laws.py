"""Laws fitted to trained models: the line of a law beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import BLUE, INK, ORANGE, altair, as_title, data, graded
from curvlens.results import Gain, LossLaw, Power

POINTS = 60
"""Of the curve of a law."""


def power(result: Power) -> Any:
    """Every trained model, the law through them, and its interval."""
    alt = altair()
    x, level = result.x.tolist(), f"{result.level:.0%}"
    log = alt.Scale(type="log", nice=False, padding=12)
    at = alt.X("x:Q", title=as_title(printable(result.over)), scale=log)
    title = as_title(printable(result.quantity))
    ends = zip(x, result.low.tolist(), result.high.tolist(), strict=True)
    law = [{"x": x, "y": result(x), "low": low, "high": high} for x, low, high in ends]
    band = data([row for row in law if row["low"] > 0 and row["high"] < math.inf])  # else it has no logarithm
    line = data([row for row in law if 0 < row["y"] < math.inf])
    seen = data([{"x": a, "y": b} for line in result.y.tolist() for a, b in zip(x, line, strict=True)])
    low, high = result.interval
    exponent = f"exponent {result.exponent:.3g}, {low:.3g} to {high:.3g} at {level}"
    return alt.layer(
        alt.Chart(band).mark_area(color=BLUE, opacity=0.2).encode(x=at, y=alt.Y("low:Q", scale=log), y2="high:Q"),
        alt.Chart(line).mark_line(color=BLUE).encode(x=at, y=alt.Y("y:Q", title=title, scale=log)),
        alt.Chart(seen).mark_point(color=INK, filled=True, size=24).encode(x=at, y=alt.Y("y:Q", scale=log)),
    ).properties(width=420, height=260, title=exponent)


def loss(result: LossLaw, over: str = "samples") -> Any:
    """The loss over the samples, a line of the law for each model size; ``over="parameters"``: the other way round."""
    if over not in ("samples", "parameters"):
        raise CurvlensError(f"over={over!r}, expected 'samples' or 'parameters'.")
    alt = altair()
    other = "parameters" if over == "samples" else "samples"
    records = result.table()
    places = [record[over] for record in records]
    first, last = math.log(min(places)), math.log(max(places))
    grid = [math.exp(first + (last - first) * i / (POINTS - 1)) for i in range(POINTS)]
    sizes = sorted({record[other] for record in records})
    said = _apart(sizes)
    curves = [
        {"x": x, "y": result(size, x) if over == "samples" else result(x, size), "size": said[size]}
        for size in sizes
        for x in grid
    ]
    points = [{"x": r[over], "y": r["loss"], "size": said[r[other]]} for r in records]
    log = alt.Scale(type="log", nice=False, padding=12)
    names = {"samples": "samples D", "parameters": "parameters N"}
    colour = alt.Color("size:N", title=names[other], sort=None, scale=graded([*said.values()]))
    place = alt.X("x:Q", title=names[over], scale=log)
    value = alt.Y("y:Q", title="loss", scale=log)
    layers = [
        alt.Chart(data(curves)).mark_line().encode(x=place, y=value, color=colour),
        alt.Chart(data(points)).mark_point(filled=True, size=30).encode(x=place, y=value, color=colour),
    ]
    least = min(each["y"] for each in [*curves, *points])
    if least / 3 < result.E:  # else it would push everything else to the upper edge
        floor = data([{"y": result.E, "text": f"E = {result.E:.3g}"}])
        layers.append(alt.Chart(floor).mark_rule(color=ORANGE, strokeDash=[4, 3]).encode(y=value))
        written = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -2, "color": ORANGE}
        layers.append(alt.Chart(floor).mark_text(**written).encode(y=value, x=alt.value(0), text="text:N"))
    return alt.layer(*layers).properties(width=420, height=260)


def _apart(sizes: Sequence[float]) -> dict[float, str]:
    """Sizes in words, with as many digits as tell them apart."""
    if all(size == round(size) for size in sizes):
        return {size: f"{size:,.0f}" for size in sizes}
    words = ([f"{size:,.{digits}g}" for size in sizes] for digits in range(3, 18))  # 17 digits tell all floats apart
    return dict(zip(sizes, next(each for each in words if len(set(each)) == len(sizes)), strict=True))


def gain(result: Gain) -> Any:
    """A point for each left-out setting: the error of its prediction with curvature over that without."""
    alt = altair()
    records = result.table()
    log = alt.Scale(type="log", nice=False, padding=12)
    shown = [r for r in records if r["without"] > 0 and r["with_curvature"] > 0]
    if not shown:
        raise CurvlensError("There is nothing to draw: every prediction is exact, and 0 has no logarithm.")
    both = [r[name] for r in shown for name in ("without", "with_curvature")]
    apart = alt.Axis(labelOverlap="greedy", labelSeparation=6)
    x = alt.X("without:Q", title="|error of log L|, the law alone", scale=log, axis=apart)
    y = alt.Y("with_curvature:Q", title=f"with {printable(' and '.join(result.curvature))}", scale=log, axis=apart)
    equal = data([{"without": end, "with_curvature": end} for end in (min(both), max(both))])
    points = alt.Chart(data(shown)).mark_point(filled=True, color=INK, size=36)
    line = alt.Chart(equal).mark_line(color=ORANGE, strokeDash=[4, 3]).encode(x=x, y=y)
    hover = ["parameters:Q", "samples:Q", "without:Q", "with_curvature:Q"]
    title = "below the line curvature helps"
    return alt.layer(line, points.encode(x=x, y=y, tooltip=hover)).properties(width=300, height=300, title=title)
