"""The charts of the page of an analysis, as specifications of Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.errors import printable
from curvlens.report.plots.frame import BLUE, INK, ORANGE, altair, data, styled

COLOURS = {"H": INK, "G": BLUE, "F": ORANGE}
Spec = dict[str, Any]


def _spec(chart: Any) -> Spec:
    spec: Spec = styled(chart).to_dict()
    return spec


def _colour(alt: Any, letters: Sequence[str]) -> Any:
    scale = alt.Scale(domain=list(letters), range=[COLOURS[letter] for letter in letters])
    return alt.Color("operator:N", scale=scale, legend=alt.Legend(title=None, orient="top"))


def densities(pictures: Sequence[Mapping[str, Any]], eigenvalues: Mapping[str, Sequence[Mapping[str, Any]]]) -> Spec:
    """Share of eigenvalues between points of a mirrored logarithmic axis, with its band; eigenvalues as ticks."""
    alt = altair()
    records = []
    for picture in pictures:
        for i, share in enumerate(picture["share"]):
            if picture["high"][i] > 0:
                records.append(
                    {
                        "x": picture["x"][i],
                        "x2": picture["x"][i + 1] if i + 1 < len(picture["x"]) else picture["x"][i],
                        "share": max(share, 1e-9),
                        "low": max(picture["low"][i], 1e-9),
                        "high": max(picture["high"][i], 1e-9),
                        "operator": picture["operator"],
                    }
                )
    largest = max((abs(x) for picture in pictures for x in picture["x"]), default=1.0)
    axis = alt.Scale(type="symlog", constant=largest * 1e-6)
    letters = list(dict.fromkeys(record["operator"] for record in records))
    least = 0.3 / max(picture["n"] for picture in pictures)  # less than one eigenvalue
    for record in records:
        record |= {name: max(record[name], least) for name in ("share", "low", "high")}
    x = alt.X("x:Q", title="eigenvalue", scale=axis, axis=alt.Axis(format=".0e", tickCount=7))
    y = alt.Y("share:Q", title="share of eigenvalues", scale=alt.Scale(type="log", domainMin=least), axis=alt.Axis(format=".0e", tickCount=5))
    base = alt.Chart(data(records)).encode(x=x, color=_colour(alt, letters))
    band = base.mark_area(opacity=0.18, interpolate="step-after").encode(y=alt.Y("low:Q", title=""), y2="high:Q")
    curve = base.mark_line(interpolate="step-after", strokeWidth=1.4).encode(y=y)
    ticks = [
        {"x": value["value"], "operator": letter, "said": f"{value['value']:.4g} ± {value['bound']:.1g}"}
        for letter, values in eigenvalues.items()
        for value in values
    ]
    layers = [band, curve]
    if ticks:
        marks = alt.Chart(data(ticks)).mark_tick(thickness=2, size=16, orient="vertical")
        layers.append(
            marks.encode(x=x, y=alt.value(8), color=_colour(alt, letters), tooltip=[alt.Tooltip("said:N", title="λ")])
        )
    return _spec(alt.layer(*layers).properties(width="container", height=260))


def roles(pictures: Sequence[Mapping[str, Any]]) -> Spec:
    """A small density for each role, on shared axes."""
    alt = altair()
    records = [
        {"x": picture["x"][i], "share": max(share, 1e-9), "name": printable(picture["role"] or picture["block"])}
        for picture in pictures
        for i, share in enumerate(picture["share"])
        if share > 0
    ]
    largest = max((abs(x) for picture in pictures for x in picture["x"]), default=1.0)
    x = alt.X("x:Q", title=None, scale=alt.Scale(type="symlog", constant=largest * 1e-6), axis=alt.Axis(format=".0e", tickCount=3))
    y = alt.Y("share:Q", title=None, scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=3))
    chart = alt.Chart(data(records)).mark_line(interpolate="step-after", color=INK, strokeWidth=1.1).encode(x=x, y=y)
    return _spec(chart.properties(width=190, height=100).facet(alt.Facet("name:N", title=None), columns=4))


def bars(records: Sequence[Mapping[str, Any]], title: str, *, signed: bool = False) -> Spec:
    """Horizontal bars: ``name``, ``value`` and, where it is known, ``low`` and ``high``."""
    alt = altair()
    shown = [{**record, "name": printable(str(record["name"]))} for record in records]
    y = alt.Y("name:N", sort=[record["name"] for record in shown], title=None, axis=alt.Axis(labelLimit=220))
    base = alt.Chart(data(shown)).encode(y=y, tooltip=["name:N", alt.Tooltip("value:Q", format=".4g")])
    chart = base.mark_bar(color=INK if signed else BLUE, height={"band": 0.7}).encode(x=alt.X("value:Q", title=title))
    if any("low" in record for record in shown):
        chart = alt.layer(chart, base.mark_rule(color=ORANGE).encode(x="low:Q", x2="high:Q"))
    return _spec(chart.properties(width=420, height={"step": 18}))


def lines(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Spec:
    """The loss along eigenvectors: true, and by the quadratic model."""
    alt = altair()
    records = []
    for which, line in found:
        for t, loss, model in zip(line["radii"], line["losses"], line["model"], strict=True):
            for kind, value in (("loss", loss), ("quadratic model", model)):
                if value is not None and math.isfinite(value):
                    records.append({"t": t, "loss": value, "kind": kind, "which": which})
    scale = alt.Scale(domain=["loss", "quadratic model"], range=[INK, ORANGE])
    base = alt.Chart(data(records)).encode(
        x=alt.X("t:Q", title="distance along the eigenvector"),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
    )
    layered = alt.layer(base.mark_line(strokeWidth=1.5), base.mark_point(size=18, filled=True))
    chart = layered.properties(width=330, height=200).facet(alt.Facet("which:N", title=None), columns=2)
    return _spec(chart.resolve_scale(x="independent", y="independent"))


def parts(records: Sequence[Mapping[str, Any]]) -> Spec:
    """Gauss–Newton and functional part of the trace, layer by layer."""
    alt = altair()
    shown = [{**record, "name": printable(str(record["name"]))} for record in records]
    order = list(dict.fromkeys(record["name"] for record in shown))
    chart = alt.Chart(data(shown)).mark_bar().encode(
        x=alt.X("name:N", sort=order, title=None, axis=alt.Axis(labelAngle=-40)),
        xOffset="operator:N",
        y=alt.Y("value:Q", title="trace"),
        color=_colour(alt, ["G", "F"]),
        tooltip=["name:N", "operator:N", alt.Tooltip("value:Q", format=".4g")],
    )
    return _spec(chart.properties(width={"step": 16}, height=200))


def curves(records: Sequence[Mapping[str, Any]], title: str) -> Spec:
    """Curves over the layers: ``layer``, ``value``, ``operator``; sizes on a logarithm."""
    alt = altair()
    shown = [{**record, "layer": printable(str(record["layer"])), "value": abs(record["value"])} for record in records]
    order = list(dict.fromkeys(record["layer"] for record in shown))
    kinds = list(dict.fromkeys(record["operator"] for record in shown))
    palette = [COLOURS.get(kind, colour) for kind, colour in zip(kinds, (INK, BLUE, ORANGE, "#009e73", "#cc79a7"), strict=False)]
    chart = alt.Chart(data(shown)).mark_line(point=True).encode(
        x=alt.X("layer:N", sort=order, title=None, axis=alt.Axis(labelAngle=-40)),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=5)),
        color=alt.Color("operator:N", scale=alt.Scale(domain=kinds, range=palette), legend=alt.Legend(title=None, orient="top")),
        tooltip=["layer:N", "operator:N", alt.Tooltip("value:Q", format=".4g")],
    )
    return _spec(chart.properties(width={"step": 34}, height=220))


def grid(records: Sequence[Mapping[str, Any]], title: str, *, x: str = "layer", y: str = "head", scheme: str = "viridis") -> Spec:
    """A plain heat map of two names and a value."""
    alt = altair()
    shown = [{**record, x: printable(str(record[x])), y: printable(str(record[y]))} for record in records]
    xs, ys = (list(dict.fromkeys(record[key] for record in shown)) for key in (x, y))
    chart = alt.Chart(data(shown)).mark_rect(stroke="#fefefe").encode(
        x=alt.X(f"{x}:N", sort=xs, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=120)),
        y=alt.Y(f"{y}:N", sort=ys, title=y if y == "head" else None, axis=alt.Axis(labelLimit=160)),
        color=alt.Color("value:Q", title=title, scale=alt.Scale(scheme=scheme)),
        tooltip=[f"{x}:N", f"{y}:N", alt.Tooltip("value:Q", format=".3g")],
    )
    return _spec(chart.properties(width=20 * len(xs), height=18 * len(ys)))


def edge(records: Sequence[Mapping[str, Any]]) -> Spec:
    """Where optimisers are beside their edge of stability, which is at 1."""
    alt = altair()
    y = alt.Y("name:N", sort=[record["name"] for record in records], title=None, axis=alt.Axis(labelLimit=260))
    top = max([1.2, *(record["high"] * 1.1 for record in records)])
    base = alt.Chart(data(list(records))).encode(y=y)
    x = alt.X("value:Q", title="share of the edge of stability", scale=alt.Scale(domain=[0, top]))
    mark = base.mark_bar(color=BLUE, height={"band": 0.5}).encode(x=x)
    error = base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")
    line = alt.Chart(data([{"x": 1}])).mark_rule(color=ORANGE, strokeDash=[5, 3], size=2).encode(x="x:Q")
    return _spec(alt.layer(mark, error, line).properties(width=460, height={"step": 28}))
