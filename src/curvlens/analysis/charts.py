"""The charts of the page of an analysis, as specifications of Vega-Lite.

A width of "container" is the width of the page, at most ``usermeta.widest`` pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from curvlens.analysis.numbers import ends, said
from curvlens.dynamics.advice import percent, short
from curvlens.errors import printable
from curvlens.report.plots.frame import BLUE, GAP, INK, ORANGE, altair, data, styled

COLOURS = {"H": INK, "G": BLUE, "F": ORANGE}
KINDS = {"gradient": BLUE, "weights": ORANGE}
Spec = dict[str, Any]
Cell = Mapping[str, Any]
LONGEST = 60
"""Characters of a name on a chart."""
LABELS = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 1e4 || abs(datum.value) < 1e-3 ? "
    "replace(format(datum.value, '~e'), 'e+', 'e') : format(datum.value, '~r')"
)
"""Labels of an axis: 2e4, 10, 0.1, 3e-5."""
MANY = 8
"""Columns that fit on a narrow page."""
LEAST = 120
"""Pixels of a chart with few columns: the title of its axis must fit."""
_ROLES, _WIDTH = 190, 300


def available() -> bool:
    """Whether the packages that draw charts are installed."""
    return all(find_spec(name) is not None for name in ("altair", "vl_convert"))


def name(words: object) -> str:
    """A name as it stands on a chart: no hidden characters, and not too long."""
    whole = printable(str(words))
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 20]}…{whole[-19:]}"


def _spec(chart: Any, **about: int) -> Spec:
    spec: Spec = styled(chart).to_dict(validate=False)
    spec.get("config", {}).setdefault("header", {}).update({"labelColor": INK, "labelLimit": 180, "labelFontSize": 11})
    return {**spec, "usermeta": about}


def _powers(most: float, count: int) -> list[float]:
    """Powers of ten on both sides of 0, down to a millionth of the largest."""
    top = math.floor(math.log10(most))
    sizes = [10.0**power for power in range(top, top - 6, -max(1, round(6 / count)))]
    return [*(-x for x in sizes), 0.0, *reversed(sizes)]


def _decades(least: float) -> list[float]:
    """Powers of ten from 1 down."""
    return [10.0**-power for power in range(math.floor(-math.log10(least)) + 1)]


def _eigenvalues(alt: Any, most: float, title: str | None, count: int) -> Any:
    """A logarithmic axis, mirrored at 0."""
    scale = alt.Scale(type="symlog", constant=most * 1e-6, domain=[-most, most], nice=False)
    axis = alt.Axis(values=_powers(most, count), labelExpr=LABELS, labelOverlap=True, grid=False)
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def largest(pictures: Sequence[Mapping[str, Any]]) -> float:
    """The largest |λ| of densities: their shared axis ends there."""
    return max((abs(x) for picture in pictures for x in picture["x"]), default=1.0) or 1.0


def _steps(picture: Mapping[str, Any], least: float) -> list[dict[str, Any]]:
    """A record for each bin; a bin with less than one eigenvalue is a gap of the line."""
    return [
        {
            "x": picture["x"][i],
            "share": share if share >= least else None,
            "low": max(picture["low"][i], least),
            "high": max(picture["high"][i], least),
        }
        for i, share in enumerate(picture["share"])
    ]


def density(
    picture: Mapping[str, Any], values: Sequence[Cell], most: float, least: float, homes: Sequence[str]
) -> Spec:
    """Share of eigenvalues in the bins of a mirrored logarithmic axis, with its band; eigenvalues as ticks.

    ``most`` and ``least`` are the ends of the axes, ``homes`` the blocks where the eigenvectors live.
    """
    alt = altair()
    colour = COLOURS[picture["operator"]]
    x = _eigenvalues(alt, most, "eigenvalue λ", 6)
    scale = alt.Scale(type="log", domain=[least, 1.0])
    axis = alt.Axis(labelExpr=LABELS, values=_decades(least), minExtent=36)
    y = alt.Y("share:Q", title="share of eigenvalues in a bin", scale=scale, axis=axis)
    base = alt.Chart(data(_steps(picture, least))).encode(x=x)
    band = base.mark_area(opacity=0.2, interpolate="step-after", color=colour).encode(
        y=alt.Y("low:Q", scale=scale, title="share of eigenvalues in a bin", axis=axis), y2="high:Q"
    )
    layers = [band, base.mark_line(interpolate="step-after", strokeWidth=1.6, color=colour).encode(y=y)]
    layers += _atoms(alt, picture, x, scale, least)
    ticks = [
        {"x": value["value"], "λ": said(value), "home": name(home)}
        for value, home in zip(values, homes or [""] * len(values), strict=True)
    ]
    if ticks:
        marks = alt.Chart(data(ticks)).mark_tick(thickness=2, size=14, orient="vertical", color=colour)
        tooltip = [alt.Tooltip("λ:N"), *([alt.Tooltip("home:N", title="mostly in")] if homes else [])]
        layers.append(marks.encode(x=x, y=alt.value(7), tooltip=tooltip))
    # The outermost ones have their names beside them.
    outer = [(ticks[-1], "right", -5, 16)] if ticks and ticks[-1]["x"] > 0 else []
    outer += [(ticks[0], "left", 5, 28)] if ticks and ticks[0]["x"] < 0 else []
    for tick, align, dx, down in outer:
        label = tick["λ"] + (f", mostly in {tick['home']}" if tick["home"] else "")
        text = alt.Chart(data([{"x": tick["x"], "label": label}]))
        mark = text.mark_text(align=align, dx=dx, fontSize=10, color=INK, baseline="top", limit=220)
        layers.append(mark.encode(x=x, y=alt.value(down), text="label:N"))
    return _spec(alt.layer(*layers).properties(width="container", height=190), widest=1000)


def _atoms(alt: Any, picture: Mapping[str, Any], x: Any, scale: Any, least: float) -> list[Any]:
    """Circles at values that several eigenvalues share, with their share."""
    atoms = [
        {"x": atom["at"], "share": max(atom["value"], least), "atom": percent(atom["value"], atom["stderr"])}
        for atom in picture.get("marked", ())
    ]
    if not atoms:
        return []
    y = alt.Y("share:Q", scale=scale, title="share of eigenvalues in a bin")
    base = alt.Chart(data(atoms)).encode(x=x, y=y, tooltip=[alt.Tooltip("atom:N", title="share of the atom")])
    colour = COLOURS[picture["operator"]]
    circle = base.mark_point(size=60, filled=True, color=GAP, stroke=colour, strokeWidth=2, opacity=1)
    return [circle, base.mark_text(align="left", dx=9, dy=9, fontSize=10, color=INK).encode(text="atom:N")]


def roles(pictures: Sequence[Mapping[str, Any]]) -> Spec:
    """A small density for each role, on shared axes."""
    alt = altair()
    least = 0.3 / max(picture["n"] for picture in pictures)
    records = [
        {**record, "name": name(picture["role"] or picture["block"])}
        for picture in pictures
        for record in _steps(picture, least)
    ]
    order = list(dict.fromkeys(record["name"] for record in records))
    x = _eigenvalues(alt, largest(pictures), "λ", 2)
    scale = alt.Scale(type="log", domain=[least, 1.0])
    y = alt.Y("share:Q", title="share", scale=scale, axis=alt.Axis(labelExpr=LABELS, values=_decades(least)[::2]))
    base = alt.Chart().encode(x=x)
    band = base.mark_area(opacity=0.2, interpolate="step-after", color=INK).encode(
        y=alt.Y("low:Q", scale=scale, title="share", axis=alt.Axis(labelExpr=LABELS, values=_decades(least)[::2])),
        y2="high:Q",
    )
    line = base.mark_line(interpolate="step-after", color=INK, strokeWidth=1.1).encode(y=y)
    chart = alt.layer(band, line, data=data(records)).properties(width=_ROLES, height=90)
    return _spec(chart.facet(alt.Facet("name:N", title=None, sort=order), columns=4), margin=64)


def bars(records: Sequence[tuple[str, float]], title: str) -> Spec:
    """Horizontal bars of shares, each with its number at its end."""
    alt = altair()
    shown = [{"name": name(who), "value": value, "said": percent(value)} for who, value in records]
    y = alt.Y(
        "name:N", sort=[record["name"] for record in shown], title=None, axis=alt.Axis(labelLimit=140, ticks=False)
    )
    top = max((value for _, value in records), default=1.0) * 1.15
    axis = alt.Axis(format="%", tickCount=5, grid=False)
    x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, top], nice=False), axis=axis)
    base = alt.Chart(data(shown)).encode(y=y, x=x)
    text = base.mark_text(align="left", dx=4, color=INK, fontSize=10).encode(text="said:N")
    chart = alt.layer(base.mark_bar(color=BLUE, height={"band": 0.7}), text)
    return _spec(chart.properties(width="container", height=18 * len(shown)), widest=560)


WIDER = 1.5
"""A line is drawn up to the first loss beyond so many times its radius of agreement: where the two have parted."""
SMOOTH = 120
"""Steps of a drawn parabola."""


def lines(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Spec:
    """The loss along eigenvectors, where it was computed, and the quadratic model as a parabola, near where they part.

    Dashed verticals are at the radii of agreement.
    """
    alt = altair()
    records = [{**record, "which": which} for which, line in found for record in _line(line)]
    scale = alt.Scale(domain=["loss", "quadratic model"], range=[INK, ORANGE])
    base = alt.Chart().encode(
        x=alt.X(
            "t:Q",
            title="distance along the unit eigenvector",
            axis=alt.Axis(tickCount=5, grid=False, labelExpr=LABELS, labelOverlap=True),
        ),
    )
    drawn = base.transform_filter("datum.kind != 'radius'").encode(
        y=alt.Y(
            "loss:Q", title="loss (nats)", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5, labelExpr=LABELS)
        ),
        color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
        tooltip=["kind:N", alt.Tooltip("t:Q", format=".3g"), alt.Tooltip("loss:Q", format=".4g")],
    )
    dashes = alt.Scale(domain=["loss", "quadratic model"], range=[[1, 0], [5, 3]])
    dash = alt.StrokeDash("kind:N", scale=dashes, legend=alt.Legend(title=None, orient="top"))
    layered = alt.layer(
        base.transform_filter("datum.kind == 'radius'").mark_rule(color=INK, opacity=0.35, strokeDash=[2, 3]),
        drawn.mark_line(strokeWidth=1.6).encode(strokeDash=dash),
        drawn.transform_filter("datum.kind == 'loss'").mark_point(size=16, filled=True),
        data=data(records),
    )
    chart = layered.properties(width=_WIDTH, height=190).facet(
        alt.Facet("which:N", title=None, sort=[which for which, _ in found]), columns=2
    )
    return _spec(chart.resolve_scale(x="independent", y="independent"), margin=80)


def _line(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Losses, a parabola of many points from slope and curvature, and the radii, as far as they are shown."""
    radii, end = line["radii"], _end(line)
    pairs = [(t, x) for t, x in zip(radii, line["losses"], strict=True) if x is not None and abs(t) <= end]
    start = next((x for t, x in pairs if t == 0), None)
    records = [{"t": t, "loss": x, "kind": "loss"} for t, x in pairs if math.isfinite(x)]
    if start is not None and math.isfinite(start):
        low, high = max(-end, min(radii)), min(end, max(radii))
        steps = [low + (high - low) * i / SMOOTH for i in range(SMOOTH + 1)]
        model = [(t, start + t * line["slope"] + t * t * line["curvature"] / 2) for t in steps]
        records += [{"t": t, "loss": x, "kind": "quadratic model"} for t, x in model if math.isfinite(x)]
    edges = [sign * line[side] for side, sign in (("backward", -1), ("forward", 1)) if not line[f"{side}_open"]]
    return records + [{"t": t, "kind": "radius"} for t in edges if 0 < abs(t) <= end]


def _end(line: Mapping[str, Any]) -> float:
    """How far a line is drawn, on both sides: to a computed loss beyond its larger radius; all of it without one."""
    sizes, radius = sorted(abs(t) for t in line["radii"]), max(line["forward"], line["backward"])
    beyond = [size for size in sizes if size >= WIDER * radius]
    return float(beyond[0] if radius > 0 and beyond else sizes[-1])


def _columns(names: Sequence[str], step: int) -> int | str:
    """The width of a chart with a column for each name: many columns share the width of the page."""
    return max(step * len(names), LEAST) if len(names) <= MANY else "container"


def parts(records: Sequence[Mapping[str, Any]]) -> Spec:
    """Gauss–Newton and functional part of the trace, layer by layer: ``name``, ``operator``, ``value``, ``stderr``."""
    alt = altair()
    shown = [
        {
            "name": name(record["name"]), "operator": record["operator"], "value": record["value"],
            "said": said(record), "low": ends(record)[0], "high": ends(record)[1],
        }
        for record in records
    ]  # fmt: skip
    order = list(dict.fromkeys(record["name"] for record in shown))
    scale = alt.Scale(domain=["G", "F"], range=[BLUE, ORANGE])
    base = alt.Chart(data(shown)).encode(
        x=alt.X("name:N", sort=order, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=100, labelOverlap=True)),
        xOffset=alt.XOffset("operator:N", sort=["G", "F"]),
        tooltip=["name:N", "operator:N", alt.Tooltip("said:N", title="trace")],
    )
    words = "datum.label == 'G' ? 'G, Gauss–Newton part' : 'F, functional part'"
    colour = alt.Color(
        "operator:N", scale=scale, legend=alt.Legend(title=None, orient="top", labelExpr=words, labelLimit=0)
    )
    bar = base.mark_bar().encode(y=alt.Y("value:Q", title="trace", axis=alt.Axis(labelExpr=LABELS)), color=colour)
    error = base.mark_rule(color=INK).encode(y="low:Q", y2="high:Q")
    return _spec(alt.layer(bar, error).properties(width=_columns(order, 60), height=200), widest=1100)


def _sizes(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, and 2 and 5 times these where there are few of them."""
    found = [record[end] for record in records for end in ("low", "high") if record[end] > 0] or [1.0]
    powers = range(math.floor(math.log10(min(found))), math.ceil(math.log10(max(found))) + 1)
    factors, every = ((1, 2, 5) if len(powers) < 4 else (1,)), max(1, round(len(powers) / 6))
    return [factor * 10.0**power for power in powers[::every] for factor in factors]


def curves(records: Sequence[Mapping[str, Any]], title: str) -> Spec:
    """Curves over the layers: ``layer``, ``value``, ``operator``, and an error if it has one; sizes on a logarithm."""
    alt = altair()
    shown = []
    for record in records:
        if record["value"]:
            size, (low, high) = abs(record["value"]), ends(record)
            low, high = sorted(map(abs, (low, high))) if low * high > 0 else (0.0, max(-low, high))
            shown.append(
                {
                    "layer": name(record["layer"]), "operator": record["operator"], "value": size,
                    "low": max(low, size / 10), "high": high, "said": said(record),
                }
            )  # fmt: skip
    order = list(dict.fromkeys(record["layer"] for record in shown))
    kinds = list(dict.fromkeys(record["operator"] for record in shown))
    scale = alt.Scale(domain=kinds, range=[{**COLOURS, **KINDS}[kind] for kind in kinds])
    axis = alt.Axis(labelExpr=LABELS, values=_sizes(shown))
    base = alt.Chart(data(shown)).encode(
        x=alt.X("layer:N", sort=order, title="layer", axis=alt.Axis(labelAngle=-40, labelLimit=100, labelOverlap=True)),
        color=alt.Color("operator:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
        tooltip=["layer:N", "operator:N", alt.Tooltip("said:N", title=title)],
    )
    y = alt.Y("value:Q", title=title, scale=alt.Scale(type="log", nice=True), axis=axis)
    error = base.mark_rule().encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    chart = alt.layer(base.mark_line(point=True).encode(y=y), error)
    return _spec(chart.properties(width=_columns(order, 60), height=200), widest=1100)


def grid(
    records: Sequence[Mapping[str, Any]],
    title: str,
    *,
    x: tuple[str, str] = ("layer", "layer"),
    y: tuple[str, str] = ("head", "head"),
) -> Spec:
    """A plain heat map of two names and a value: ``x`` and ``y`` are a field and the title of its axis."""
    alt = altair()
    (across, x_title), (down, y_title) = x, y
    shown = [{**record, across: name(record[across]), down: name(record[down])} for record in records]
    xs, ys = (list(dict.fromkeys(record[key] for record in shown)) for key in (across, down))
    plain = all(len(each) < 4 for each in xs)
    axis = alt.Axis(labelAngle=0 if plain else -40, labelLimit=110, labelOverlap=True, domain=False, ticks=False)
    legend = alt.Legend(format="~g", gradientLength=max(36, min(20 * len(ys), 160)))  # no taller than the chart
    chart = alt.Chart(data(shown)).mark_rect(stroke=GAP).encode(
        x=alt.X(f"{across}:N", sort=xs, title=x_title or None, axis=axis),
        y=alt.Y(f"{down}:N", sort=ys, title=y_title or None, axis=alt.Axis(labelLimit=110, domain=False, ticks=False)),
        color=alt.Color("value:Q", title=title, scale=alt.Scale(scheme="viridis"), legend=legend),
        tooltip=[f"{across}:N", f"{down}:N", alt.Tooltip("value:Q", title=title, format=".3g")],
    )  # fmt: skip
    return _spec(chart.properties(width=_columns(xs, 22), height=20 * len(ys)), widest=130 + 22 * len(xs))


def edge(records: Sequence[tuple[str, Cell]], title: str) -> Spec:
    """A bar for each optimiser: where it is, with its error, and the edge of stability at 1."""
    alt = altair()
    top = max((cell["value"] + (cell.get("bound") or 0.0) for _, cell in records), default=1.0)
    end = min(max(1.3, top * 1.25), 3.0)
    shown = [
        {
            "name": name(rule), "value": min(cell["value"], end), "low": min(ends(cell)[0], end),
            "high": min(ends(cell)[1], end), "at": min(cell["value"] + (cell.get("bound") or 0.0), end * 0.7),
            "said": _share(cell),
        }
        for rule, cell in records
    ]  # fmt: skip
    axis = alt.Axis(tickCount=5, grid=False, format="%")
    x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, end], nice=False), axis=axis)
    base = alt.Chart(data(shown)).encode(y=_optimisers(alt, shown))
    at = alt.Chart(data([{"x": 1, "said": "edge"}])).encode(x="x:Q")
    layers = [
        base.mark_bar(color=BLUE, height={"band": 0.55}).encode(x=x),
        base.mark_rule(color=INK, size=2).encode(x="low:Q", x2="high:Q"),
        at.mark_rule(color=ORANGE, strokeDash=[5, 3], size=2),
        at.mark_text(color=ORANGE, align="left", dx=4, dy=-6, fontSize=10).encode(y=alt.value(0), text="said:N"),
        *_said_at(base),
    ]
    return _spec(alt.layer(*layers).properties(width="container", height=30 * len(shown)), widest=640)


ON_BLUE = "#fdfdfd"
"""Of text on a bar, in light and dark alike."""


def rates(records: Sequence[tuple[str, Cell]], lines: Mapping[str, Cell]) -> Spec:
    """A bar for each optimiser up to its largest stable learning rate, on a logarithm.

    ``lines`` has, by optimiser, the rate at which the loss along its step rises again: an orange mark.
    """
    alt = altair()
    known = [x for cell in (*(cell for _, cell in records), *lines.values()) for x in (cell["value"], ends(cell)[1])]
    start, most = min(known) / 4, max(known)
    longest = max(ends(cell)[1] for _, cell in records)
    end = max(1.3 * most, longest * (most / start) ** 0.25)  # room for the number beside the longest bar
    shown = [
        {
            "name": name(rule), "start": start, "value": cell["value"], "low": max(ends(cell)[0], start),
            "high": ends(cell)[1], "said": said(cell), "at": ends(cell)[1],
            "inside": rule in lines and 1 < lines[rule]["value"] / ends(cell)[1] < (end / start) ** 0.25,
        }
        for rule, cell in records
    ]  # fmt: skip
    marks = [
        {"name": name(rule), "value": lines[rule]["value"], "line": said(lines[rule])}
        for rule, _ in records
        if rule in lines
    ]
    scale = alt.Scale(type="log", domain=[start, end], nice=False)
    axis = alt.Axis(labelExpr=LABELS, values=_between(start, end), grid=False)
    x = alt.X("value:Q", title="largest stable learning rate", scale=scale, axis=axis)
    y = _optimisers(alt, shown)
    base = alt.Chart(data(shown)).encode(y=y)
    layers = [
        base.mark_bar(color=BLUE, height={"band": 0.55}).encode(x=x, x2="start:Q"),
        base.mark_rule(color=INK, size=2).encode(x=alt.X("low:Q", scale=scale), x2="high:Q"),
    ]
    if marks:
        tick = alt.Chart(data(marks)).mark_tick(color=ORANGE, thickness=3, size=20)
        layers.append(tick.encode(x=x, y=y, tooltip=["name:N", alt.Tooltip("line:N", title="line search")]))
    layers += _said_at(base.transform_filter("!datum.inside"))
    inside = base.transform_filter("datum.inside").mark_text(align="right", dx=-8, fontSize=11, color=ON_BLUE)
    layers.append(inside.encode(x="at:Q", text="said:N"))  # the mark is beside the bar
    return _spec(alt.layer(*layers).properties(width="container", height=30 * len(shown)), widest=640)


def _between(start: float, end: float) -> list[float]:
    """Powers of ten inside an axis."""
    return [10.0**power for power in range(math.ceil(math.log10(start)), math.floor(math.log10(end)) + 1)]


def _optimisers(alt: Any, shown: Sequence[Mapping[str, Any]]) -> Any:
    """An axis of names, in their order."""
    axis = alt.Axis(labelLimit=150, ticks=False)
    return alt.Y("name:N", sort=[each["name"] for each in shown], title=None, axis=axis)


def _said_at(base: Any) -> list[Any]:
    """Numbers beside bars, readable on top of them."""
    halo = base.mark_text(align="left", dx=6, fontSize=11, color=GAP, stroke=GAP, strokeWidth=4)
    ink = base.mark_text(align="left", dx=6, fontSize=11, color=INK)
    return [text.encode(x="at:Q", text="said:N") for text in (halo, ink)]


def _share(cell: Cell) -> str:
    """A share of the edge: in percent, and from ten times on as a factor."""
    bound = cell.get("bound") or 0.0
    return percent(cell["value"], bound) if cell["value"] < 10 else f"{short(cell['value'])} times"
