"""Training: the loss along a line, the edge of stability, the course of an optimiser, landscapes, many models."""

from __future__ import annotations

import math
import sys
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import BLUE, INK, ORANGE, altair, data
from curvlens.results import Convergence, Forecast, Landscape, Line, Scaling, Stability

GREEN = "#009e73"
SHOWN = 4
"""Times the radius of agreement: far enough to see the two part."""
POINTS = 121
"""Of the curve of a quadratic model."""


def line(result: Line) -> Any:
    """The loss and its quadratic model, and where they part."""
    alt = altair()
    radii, losses = result.radii.tolist(), result.losses.tolist()
    farthest, radius = max(map(abs, radii)) or 1.0, max(result.forward, result.backward)
    shown = min(SHOWN * radius, farthest) if radius else farthest
    points = [
        {"t": t, "loss": loss, "what": "loss"}
        for t, loss in zip(radii, losses, strict=True)
        if abs(t) <= shown and math.isfinite(loss)
    ]
    for i in range(POINTS):
        t = shown * (2 * i / (POINTS - 1) - 1)
        value = result.loss + t * result.slope + 0.5 * t * t * result.curvature
        points.append({"t": t, "loss": value, "what": "quadratic model"})
        if result.third is not None:
            points.append({"t": t, "loss": value + result.third * t**3 / 6, "what": "cubic model"})
    colours = {"loss": INK, "quadratic model": BLUE} | ({} if result.third is None else {"cubic model": GREEN})
    colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=list(colours), range=list(colours.values())))
    base = alt.Chart(data(points)).encode(
        x=alt.X("t:Q", title="t"), y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)), color=colour
    )
    true = base.transform_filter("datum.what === 'loss'")
    ends = [{"t": t} for t in (-result.backward, result.forward) if t and abs(t) <= shown]
    rules = alt.Chart(data(ends)).mark_rule(color=ORANGE, strokeDash=[4, 3]).encode(x="t:Q")
    model = base.transform_filter("datum.what !== 'loss'").mark_line()
    return alt.layer(
        model, true.mark_line(strokeWidth=1, interpolate="monotone"), true.mark_point(filled=True), rules
    ).properties(width=420, height=240)


def stability(result: Stability, what: str = "edge") -> Any:
    """How much of the edge is used, by parameter group; ``what="mass"``: by block."""
    alt = altair()
    if what not in ("edge", "mass"):
        raise CurvlensError(f"what={what!r}, expected 'edge' or 'mass'.")
    used = max(result.ratio, 0.0)
    if what == "mass":
        records = [{"name": printable(name), "part": used * share} for name, share in result.mass.items()]
    else:
        records = [
            {"name": f"{printable(result.rule)}, group {group['group']}", "part": used * group["share"]}
            for group in result.groups
        ]
        if len(records) > 1:
            records.append({"name": "all groups", "part": used})
        else:
            records[0]["name"] = printable(result.rule)
    y = alt.Y("name:N", sort=[record["name"] for record in records], title=None)
    bars = (
        alt.Chart(data(records))
        .mark_bar(color=BLUE, height={"band": 0.7})
        .encode(x=alt.X("part:Q", title="fraction of the edge of stability"), y=y, tooltip=["name:N", "part:Q"])
    )
    edge = alt.Chart(data([{"edge": 1.0}])).mark_rule(color=ORANGE, strokeWidth=2).encode(x="edge:Q")
    return alt.layer(bars, edge).properties(width=420)


def _seen(true: Any) -> tuple[float, float]:
    """Values around the true ones: a model with negative curvature runs away from them without bound."""
    values = [x for x in ([] if true is None else true.tolist()) if math.isfinite(x)]
    if not values or max(values) == min(values):
        return -sys.float_info.max, sys.float_info.max
    span = max(values) - min(values)
    return min(values) - span, max(values) + span


def forecast(result: Forecast, what: str = "loss") -> Any:
    """The loss of the quadratic model and the true one, step by step; ``what="distance"``: the way from the start."""
    alt = altair()
    if what not in ("loss", "distance"):
        raise CurvlensError(f"what={what!r}, expected 'loss' or 'distance'.")
    pairs: dict[str, dict[str, Any]] = {
        "loss": {"true": result.true_losses, "quadratic model": result.losses, "mean with noise": result.mean},
        "distance": {"true": result.true_distances, "quadratic model": result.distances},
    }
    shown = {name: values for name, values in pairs[what].items() if values is not None and len(values) > 1}
    colours = {"true": INK, "quadratic model": BLUE, "mean with noise": ORANGE}
    low, high = _seen(shown.get("true"))
    records = [
        {"step": t, "value": value, "what": name}
        for name, values in shown.items()
        for t, value in enumerate(values.tolist())
        if low <= value <= high
    ]
    scale = alt.Scale(domain=list(shown), range=[colours[name] for name in shown])
    lines = (
        alt.Chart(data(records))
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title=what, scale=alt.Scale(zero=what == "distance")),
            color=alt.Color("what:N", title=None, scale=scale),
        )
    )
    if result.departure is None:
        return lines.properties(width=420, height=240)
    rule = alt.Chart(data([{"step": result.departure}])).mark_rule(color=ORANGE, strokeDash=[4, 3]).encode(x="step:Q")
    return alt.layer(lines, rule).properties(width=420, height=240)


def convergence(result: Convergence, what: str = "") -> Any:
    """‖g‖ over the steps beside the rates seen and predicted; ``what="curvature"``: along the path, and 2/η;
    ``what="condition"``: the condition numbers. By default the first of these that there are numbers for."""
    if what not in ("", "rate", "curvature", "condition"):
        raise CurvlensError(f"what={what!r}, expected 'rate', 'curvature' or 'condition'.")
    lines = {"rate": _rate_lines(result), "curvature": _curvature_lines(result), "condition": _conditions(result)}
    chosen = what or next((name for name, each in lines.items() if each), "rate")
    if not lines[chosen]:
        why = printable(result.note) or "Give more steps, or a spectrum."
        raise CurvlensError(f"There is nothing to draw for what={chosen!r}. {why}")
    alt = altair()
    colours = dict(zip(lines[chosen], (INK, BLUE, ORANGE), strict=False))
    drawn = lines[chosen]
    records = [{"step": t, "value": value, "what": name} for name, points in drawn.items() for t, value in points]
    titles = {"rate": "‖g‖" if result.of == "gradient" else "√(L_t − L_{t+1})", "curvature": "dᵀHd/‖d‖²"}
    positive = all(value > 0 for points in drawn.values() for _, value in points)
    return (
        alt.Chart(data(records))
        .mark_line(point=chosen == "condition")
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y(
                "value:Q",
                title=titles.get(chosen, "max |λ|/min |λ|"),
                scale=alt.Scale(type="log", nice=False) if positive else alt.Scale(zero=False),
            ),
            color=alt.Color("what:N", title=None, scale=alt.Scale(domain=list(colours), range=list(colours.values()))),
        )
        .properties(width=420, height=240)
    )


Points = dict[str, list[tuple[int, float]]]


def _rate_lines(result: Convergence) -> Points:
    if result.of == "gradient":
        seen = list(enumerate(result.gradients.tolist()))
    else:
        falls = (result.losses[:-1] - result.losses[1:]).tolist()
        seen = [(t, math.sqrt(abs(x))) for t, x in enumerate(falls)]
    seen = [(t, x) for t, x in seen if x > 0]
    if not seen:
        return {}
    found: Points = {"seen": seen}
    first, last = result.window
    inside = [math.log(x) for t, x in seen if first <= t <= last]
    if inside:
        middle, level = (first + last) / 2, sum(inside) / len(inside)
        for name, rate in (("fitted", float(result.rate)), ("by the spectrum", result.predicted)):
            if rate is not None and math.isfinite(rate) and rate > 0:
                ends = [level + (t - middle) * math.log(rate) for t in (first, last)]
                found[name] = [(t, math.exp(x)) for t, x in zip((first, last), ends, strict=True) if abs(x) < 700]
    return found


def _curvature_lines(result: Convergence) -> Points:
    shown = result.shown_curvature()
    found: Points = {"along the path": shown} if shown else {}
    if shown and result.edge is not None:
        found["2/η"] = [(shown[0][0], result.edge), (shown[-1][0], result.edge)]
    return found


def _conditions(result: Convergence) -> Points:
    steps = result.spectrum_steps.tolist()
    return {"condition": list(zip(steps, result.condition.tolist(), strict=True))} if steps else {}


def landscape(result: Landscape, what: str = "settling") -> Any:
    """Increments and distances against k; ``what="around"``: √E D² around θ, by the quadratic model and in truth."""
    alt = altair()
    if what not in ("settling", "around"):
        raise CurvlensError(f"what={what!r}, expected 'settling' or 'around'.")
    sizes = result.k.tolist()
    if what == "settling":
        shown = {"increment": result.increment, "distance": result.distance}
        if len(result.hessian_distance):
            shown |= {"gradient": result.gradient_distance, "Hessian": result.hessian_distance}
        records = [
            {"k": k, "value": value, "what": name}
            for name, values in shown.items()
            for k, value in zip(sizes, values.tolist(), strict=True)
        ]
        colours = [BLUE, INK, ORANGE, GREEN][: len(shown)]
        colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=list(shown), range=colours))
        dash, title = alt.value([1, 0]), "root mean square"
    else:
        if not len(result.radii):
            raise CurvlensError("There are no surroundings: the landscape was measured at θ only. Give radii=[0.1].")
        both = {"quadratic model": result.second, "true": result.true_second}
        records = [
            {"k": k, "value": float(values[i, j]) ** 0.5, "what": name, "radius": f"{radius:.3g}"}
            for name, values in both.items()
            for i, radius in enumerate(result.radii.tolist())
            for j, k in enumerate(sizes)
            if float(values[i, j]) > 0
        ]
        colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=list(both), range=[BLUE, INK]))
        dash, title = alt.StrokeDash("radius:N", title="radius"), "√E D²"
    records = [record for record in records if record["value"] > 0]
    log = alt.Scale(type="log", nice=False)
    return (
        alt.Chart(data(records))
        .mark_line(point=True)
        .encode(
            x=alt.X("k:Q", title="samples", scale=log),
            y=alt.Y("value:Q", title=title, scale=log),
            color=colour,
            strokeDash=dash,
        )
        .properties(width=420, height=260)
    )


def scaling(result: Scaling, what: str = "lambda_max", over: str | None = None) -> Any:
    """One number of every model over one setting, a point for each seed; lines join the means of equal settings."""
    alt = altair()
    varying = result.varying() or [name for name in result.settings if name != "seed"]
    over = varying[0] if over is None else over
    x, y = result.column(over), result.column(what)
    others = [name for name in varying if name != over]
    rows = zip(x, y, *(result.settings[name] for name in others), strict=True)
    records = [
        {"x": a, "y": b, "models": ", ".join(f"{name} {c}" for name, c in zip(others, rest, strict=True)) or "all"}
        for a, b, *rest in rows
        if a is not None and b is not None
    ]

    def axis(values: list[Any], title: str, channel: Any) -> Any:
        numeric = all(isinstance(each, (int, float)) for each in values)
        log = numeric and bool(values) and all(each > 0 for each in values)
        scale = alt.Scale(type="log", nice=False) if log else alt.Undefined
        return channel(f"{title}:{'Q' if numeric else 'O'}", title=over if title == "x" else what, scale=scale)

    colour = alt.Color("models:N", title=None, sort=None, legend=alt.Legend() if others else None)
    vertical = axis([record["y"] for record in records], "y", alt.Y)
    base = alt.Chart(data(records)).encode(x=axis([record["x"] for record in records], "x", alt.X), color=colour)
    means = base.mark_line().encode(y=vertical.aggregate("mean"))
    return alt.layer(means, base.mark_point(filled=True, size=24).encode(y=vertical)).properties(width=420, height=260)
