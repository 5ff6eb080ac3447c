"""The charts of a comparison, as specifications of Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from curvlens.analysis.charts import LABELS
from curvlens.analysis.differences import error_of, said
from curvlens.dynamics.advice import percent
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
    legend = alt.Legend(title=None, orient="top", labelLimit=260, symbolOpacity=1)
    return alt.Color("run:N", sort=list(names), scale=scale, legend=legend)


def spectra(found: Sequence[tuple[str, Density, Sequence[Mapping[str, Any]]]]) -> Spec:
    """Densities of one operator, one curve with its band for each analysis; eigenvalues as ticks, a row for each."""
    alt = altair()
    names = [printable(name) for name, _, _ in found]
    least = min(0.3 / density["n"] for _, density, _ in found)  # less than one eigenvalue in a decade
    records = [
        {"x": x, "run": name, "side": side, **{key: max(value, least) for key, value in sizes.items()}}
        for name, (_, density, _) in zip(names, found, strict=True)
        for side in (-1, 1)
        for x, sizes in _steps([each for each in density["bins"] if each[0] * side > 0])
    ]
    largest = max((abs(record["x"]) for record in records), default=1.0)
    marks = [10.0 ** (math.floor(math.log10(largest)) - power) for power in (0, 2, 4)]
    axis = alt.Axis(labelExpr=LABELS, values=[*(-mark for mark in marks), 0, *reversed(marks)])
    x = alt.X("x:Q", title="eigenvalue", scale=alt.Scale(type="symlog", constant=largest * 1e-6), axis=axis)
    scale = alt.Scale(type="log", domainMin=least)
    title = "share of eigenvalues in a decade"
    y = alt.Y("share:Q", title=title, scale=scale, axis=alt.Axis(labelExpr=LABELS, tickCount=5))
    base = alt.Chart(data(records)).encode(x=x, color=_colours(alt, names), detail="side:N")
    band = base.mark_area(opacity=0.14, interpolate="step-after").encode(y=alt.Y("low:Q", title=""), y2="high:Q")
    layers = [band, base.mark_line(interpolate="step-after", strokeWidth=1.5).encode(y=y)]
    layers += _atoms(alt, names, [density for _, density, _ in found], x, y, least)
    for row, (name, (_, _, eigenvalues)) in enumerate(zip(names, found, strict=True)):
        ticks = [{"x": each["value"], "run": name, "said": said(each)} for each in eigenvalues]
        if ticks:
            shown = [alt.Tooltip("run:N", title="analysis"), alt.Tooltip("said:N", title="λ")]
            mark = alt.Chart(data(ticks)).mark_tick(thickness=2, size=11, orient="vertical")
            layers.append(mark.encode(x=x, y=alt.value(7 + 14 * row), color=_colours(alt, names), tooltip=shown))
    return _spec(alt.layer(*layers).properties(width="container", height=260))


def _atoms(alt: Any, names: Sequence[str], densities: Sequence[Density], x: Any, y: Any, least: float) -> list[Any]:
    """Circles at values that several eigenvalues share, as on the page of one analysis."""
    shown = [
        {
            "x": atom["at"], "share": max(atom["value"], least), "run": name,
            "atom": percent(atom["value"], error_of(atom) or 0.0),
        }
        for name, density in zip(names, densities, strict=True)
        for atom in density["marked"]
    ]  # fmt: skip
    if not shown:
        return []
    tooltip = [alt.Tooltip("run:N", title="analysis"), alt.Tooltip("atom:N", title="share of the atom")]
    base = alt.Chart(data(shown)).encode(x=x, y=y, color=_colours(alt, names), tooltip=tooltip)
    circle = base.mark_point(size=60, filled=False, strokeWidth=2, opacity=1)
    return [circle, base.mark_text(align="left", dx=9, dy=9, fontSize=10).encode(text="atom:N")]


def _steps(bins: Sequence[Sequence[float]]) -> Iterator[tuple[float, dict[str, float]]]:
    """The starts of bins, and the end of the last. A side without eigenvalues has none."""
    if any(share > 0 for _, _, share, _, _ in bins):
        for start, _, share, low, high in bins:
            yield start, {"share": share, "low": low, "high": high}
        _, end, share, low, high = bins[-1]
        yield end, {"share": share, "low": low, "high": high}


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
        y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4, labelExpr=LABELS))
        line = base.mark_line(color=INK, strokeWidth=1.4).encode(y=y)
        point = base.mark_point(color=INK, filled=True, size=34, opacity=1).encode(y=y)
        rule = base.mark_rule(color=ORANGE, strokeWidth=1.6).encode(y=alt.Y("low:Q", title=None), y2="high:Q")
        charts.append(alt.layer(line, rule, point).properties(width=190, height=110, title=about["title"]))
    return _spec(alt.concat(*charts, columns=4, spacing=26))
