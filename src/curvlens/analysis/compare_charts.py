"""The charts of a comparison, as specifications of Vega-Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis.differences import error_of, said
from curvlens.errors import printable
from curvlens.report.plots.frame import INK, ORANGE, altair, data, styled

Spec = dict[str, Any]
Density = Mapping[str, Any]


def _spec(chart: Any) -> Spec:
    spec: Spec = styled(chart).to_dict()
    return spec


def _colours(alt: Any, names: Sequence[str]) -> Any:
    """Two in ink and orange; more, in their order, along a scale."""
    scale = (
        alt.Scale(domain=list(names), range=[INK, ORANGE])
        if len(names) < 3
        else alt.Scale(domain=list(names), scheme="viridis")
    )
    return alt.Color(
        "run:N", sort=list(names), scale=scale, legend=alt.Legend(title=None, orient="top", labelLimit=260)
    )


def spectra(found: Sequence[tuple[str, Density, Sequence[Mapping[str, Any]]]]) -> Spec:
    """Densities of one operator, one curve with its band for each analysis; eigenvalues as ticks below each other."""
    alt = altair()
    names = [printable(name) for name, _, _ in found]
    least = min(0.3 / density["n"] for _, density, _ in found)  # less than one eigenvalue in a decade
    records, ticks = [], []
    for place, (name, density, eigenvalues) in enumerate(found):
        for start, end, share, low, high in density["bins"]:
            if high > 0:
                sizes = {key: max(value, least) for key, value in (("share", share), ("low", low), ("high", high))}
                records.append({"x": start, "x2": end, **sizes, "run": printable(name)})
        ticks += [
            {"x": each["value"], "run": printable(name), "said": said(each), "y": 8 + 15 * place}
            for each in eigenvalues
        ]
    largest = max((abs(record[key]) for record in records for key in ("x", "x2")), default=1.0)
    scale = alt.Scale(type="symlog", constant=largest * 1e-6)
    x = alt.X("x:Q", title="eigenvalue", scale=scale, axis=alt.Axis(format=".0e", tickCount=7))
    y = alt.Y("share:Q", title="share of eigenvalues in a decade", scale=alt.Scale(type="log", domainMin=least), axis=alt.Axis(format=".0e", tickCount=5))  # fmt: skip
    base = alt.Chart(data(records)).encode(x=x, color=_colours(alt, names))
    band = base.mark_rect(opacity=0.15).encode(x2="x2:Q", y=alt.Y("low:Q", title=""), y2="high:Q")
    curve = base.mark_rule(strokeWidth=1.6).encode(x2="x2:Q", y=y)
    layers = [band, curve]
    if ticks:
        marks = alt.Chart(data(ticks)).mark_tick(thickness=2, size=12, orient="vertical")
        place_of = alt.Y("y:Q", scale=None, axis=None)
        shown = [alt.Tooltip("run:N", title="analysis"), alt.Tooltip("said:N", title="λ")]
        layers.append(marks.encode(x=x, y=place_of, color=_colours(alt, names), tooltip=shown))
    return _spec(alt.layer(*layers).resolve_scale(y="independent").properties(width="container", height=260))


def courses(numbers: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Spec:
    """A small chart for each number: its course over the analyses, with errors."""
    alt = altair()
    order = [printable(name) for name in names]
    charts = []
    for about in numbers.values():
        records = []
        for name, value in zip(order, about["values"], strict=True):
            if value is not None:
                error = error_of(value)
                ends = {"low": value["value"] - (error or 0.0), "high": value["value"] + (error or 0.0)}
                records.append({"run": name, "value": value["value"], **ends, "said": said(value)})
        base = alt.Chart(data(records)).encode(
            x=alt.X(
                "run:N",
                sort=order,
                scale=alt.Scale(domain=order),
                title=None,
                axis=alt.Axis(labelAngle=-40, labelLimit=90),
            ),
            tooltip=[alt.Tooltip("run:N", title="analysis"), alt.Tooltip("said:N", title=about["title"])],
        )
        y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4, format=".3~g"))
        line = base.mark_line(color=INK, strokeWidth=1.4).encode(y=y)
        point = base.mark_point(color=INK, filled=True, size=34, opacity=1).encode(y=y)
        rule = base.mark_rule(color=ORANGE, strokeWidth=1.6).encode(y=alt.Y("low:Q", title=None), y2="high:Q")
        charts.append(alt.layer(line, rule, point).properties(width=190, height=110, title=about["title"]))
    return _spec(alt.concat(*charts, columns=4, spacing=26))
