"""Training: the loss along a line, the edge of stability, the course of an optimiser, landscapes, many models."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import BLUE, INK, ORANGE, altair, as_key, as_title, data, graded, labels
from curvlens.results import Convergence, Forecast, Landscape, Line, Scaling, Stability

GREEN, GREY = "#009e73", "#7b8494"
SHOWN = 4
"""Times the radius of agreement: far enough to see the two part."""
PARTS = "parts by 5 %"
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
    low, high = _seen([point["loss"] for point in points])
    for i in range(POINTS):
        t = shown * (2 * i / (POINTS - 1) - 1)
        value = result.loss + t * result.slope + 0.5 * t * t * result.curvature
        models = {"quadratic model": value}
        if result.third is not None:
            models["cubic model"] = value + result.third * t**3 / 6
        points += [{"t": t, "loss": y, "what": name} for name, y in models.items() if low <= y <= high]
    colours = {"loss": INK, "quadratic model": BLUE} | ({} if result.third is None else {"cubic model": GREEN})
    colours |= {PARTS: ORANGE} if radius else {}
    colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=list(colours), range=list(colours.values())))
    base = alt.Chart(data(points)).encode(
        x=alt.X("t:Q", title="distance t along u = direction/‖direction‖"),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=colour,
    )
    true = base.transform_filter("datum.what === 'loss'")
    ends = [{"t": t, "what": PARTS} for t in (-result.backward, result.forward) if t and abs(t) <= shown]
    rules = alt.Chart(data(ends)).mark_rule(strokeDash=[4, 3]).encode(x="t:Q", color=colour)
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


def _seen(true: Iterable[float]) -> tuple[float, float]:
    """Values around the true ones: a model runs away from them without bound."""
    values = [x for x in true if math.isfinite(x)]
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
    colours = {"true": INK, "quadratic model": ORANGE, "mean with noise": BLUE}
    low, high = _seen(shown["true"].tolist() if "true" in shown else [])
    records = [
        {"step": t, "value": value, "what": name}
        for name, values in shown.items()
        for t, value in enumerate(values.tolist())
        if low <= value <= high
    ]
    if result.departure is not None:
        colours[PARTS] = GREY
    named = [*shown, *([PARTS] if result.departure is not None else [])]
    colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=named, range=[colours[name] for name in named]))
    lines = (
        alt.Chart(data(records))
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title=what, scale=alt.Scale(zero=what == "distance")),
            color=colour,
        )
    )
    said = {"true": f"the true {what}", "quadratic model": "the quadratic model", "mean with noise": "the mean"}
    left = [_leaving(said[name], values.tolist(), low, high) for name, values in shown.items()]
    size: dict[str, Any] = {"width": 420, "height": 240}
    if any(left):
        size["title"] = [each for each in left if each]
    if result.departure is None:
        return lines.properties(**size)
    at = data([{"step": result.departure, "what": PARTS}])
    rule = alt.Chart(at).mark_rule(strokeDash=[4, 3]).encode(x="step:Q", color=colour)
    return alt.layer(lines, rule).properties(**size)


def _leaving(name: str, values: Sequence[float], low: float, high: float) -> str:
    """To what a curve goes that leaves the picture: at its end, or at the last step outside."""
    outside = [t for t, value in enumerate(values) if not low <= value <= high]
    if not outside:
        return ""
    last = values[outside[-1]]
    where = f"to {last:.3g}" if math.isfinite(last) else "beyond float64"
    return f"{name} leaves the picture: {where} at step {outside[-1]}"


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
    """How loss, gradient and Hessian settle with k, a panel each, beside the powers of k of independent samples;
    ``what="around"``: what one more sample changes around θ, by the quadratic model and in truth; "all": both."""
    if what not in ("settling", "around", "all"):
        raise CurvlensError(f"what={what!r}, expected 'settling', 'around' or 'all'.")
    if what == "all" and len(result.radii):
        return altair().vconcat(_settling(result), _around(result)).resolve_scale(color="independent")
    return _around(result) if what == "around" else _settling(result)


def _settling(result: Landscape) -> Any:
    alt = altair()
    panels = {
        "loss (nats)": {"one more sample changes it by": result.increment, "distance from its limit": result.distance}
    }
    if len(result.hessian_distance):
        panels["gradient, ‖g_k − g‖"] = {"distance from its limit": result.gradient_distance}
        panels["Hessian, ‖H_k − H‖ (Frobenius)"] = {"distance from its limit": result.hessian_distance}
    sizes = result.k.tolist()
    names = ["one more sample changes it by", "distance from its limit", "k⁻¹", "k^-½"]
    scale = alt.Scale(domain=names, range=[BLUE, INK, "#a8c8e8", "#b0b6c2"])
    charts = []
    for title, shown in panels.items():
        records = []
        for name, values in shown.items():
            power, guide = (-1.0, "k⁻¹") if name == names[0] else (-0.5, "k^-½")
            for k, value in zip(sizes, values.tolist(), strict=True):
                records.append({"k": k, "value": value, "what": name})
                records.append({"k": k, "value": float(values[0]) * (k / sizes[0]) ** power, "what": guide})
        charts.append(_loglog([record for record in records if record["value"] > 0], title, scale, 230))
    return alt.hconcat(*charts) if len(charts) > 1 else charts[0]


def _loglog(records: list[dict[str, Any]], title: str, scale: Any, width: int) -> Any:
    alt = altair()
    log = alt.Scale(type="log", nice=False)
    base = alt.Chart(data(records)).encode(
        x=alt.X("k:Q", title="samples k", scale=log),
        y=alt.Y("value:Q", title=title, scale=log),
        color=alt.Color("what:N", title=None, scale=scale, legend=alt.Legend(orient="bottom", columns=2, labelLimit=0)),
    )
    guides = base.transform_filter("slice(datum.what, 0, 1) === 'k'").mark_line(strokeDash=[4, 3], strokeWidth=1)
    measured = base.transform_filter("slice(datum.what, 0, 1) !== 'k'").mark_line(point=True)
    return alt.layer(guides, measured).properties(width=width, height=230)


def _around(result: Landscape) -> Any:
    if not len(result.radii):
        raise CurvlensError("There are no surroundings: the landscape was measured at θ only. Give radii=[0.1].")
    alt = altair()
    charts = []
    scale = alt.Scale(domain=["quadratic model", "true loss"], range=[BLUE, INK])
    log = alt.Scale(type="log", nice=False)
    for i, radius in enumerate(result.radii.tolist()):
        records = []
        probed = [0.0] * len(result.k) if result.second_error is None else result.second_error[i].tolist()
        lines = {
            "quadratic model": (result.second[i].tolist(), probed),
            "true loss": (result.true_second[i].tolist(), result.true_error[i].tolist()),
        }
        for name, (squares, errors) in lines.items():
            for k, square, error in zip(result.k.tolist(), squares, errors, strict=True):
                if square > 0:
                    error = 0.0 if math.isnan(error) else error
                    low = math.sqrt(max(square - 2 * error, square / 100))
                    row = {"k": k, "value": math.sqrt(square), "low": low, "high": math.sqrt(square + 2 * error)}
                    records.append({**row, "what": name})
        base = alt.Chart(data(records)).encode(
            x=alt.X("k:Q", title="samples k", scale=log),
            color=alt.Color("what:N", title=None, scale=scale, legend=alt.Legend(orient="bottom")),
        )
        title = None if i else "(k + 1)(L_{k+1} − L_k), root mean square"
        y = alt.Y("value:Q", title=title, scale=log)
        bars = base.mark_rule().encode(y=alt.Y("low:Q", title=title, scale=log), y2="high:Q")
        name = "σ" if result.around == "gaussian" else "distance"
        charts.append(
            alt.layer(base.mark_line(point=True).encode(y=y), bars).properties(
                width=200, height=230, title=f"{name} {radius:.3g}"
            )
        )
    return alt.hconcat(*charts).resolve_scale(y="shared") if len(charts) > 1 else charts[0]


def scaling(result: Scaling, what: str = "lambda_max", over: str | None = None) -> Any:
    """One number of every model over one setting, a point for each seed; lines join the means of equal settings."""
    alt = altair()
    varying = result.varying() or [name for name in result.settings if name != "seed"]
    over = varying[0] if over is None else over
    x, y = result.column(over), result.column(what)
    others = [name for name in varying if name != over and not _determined(result.column(name), x)]
    rows = zip(x, y, *(result.settings[name] for name in others), strict=True)
    records = [
        {
            "x": a,
            "y": b,
            "models": ", ".join(f"{_words(name)} {_said(c)}" for name, c in zip(others, rest, strict=True)) or "all",
        }
        for a, b, *rest in rows
        if a is not None and b is not None
    ]

    def axis(key: str, column: str, channel: Any) -> Any:
        values, title = [record[key] for record in records], as_title(_words(column))
        if not all(isinstance(each, (int, float)) for each in values):
            for record in records:
                record[key] = as_key(_said(record[key]))
            return channel(f"{key}:O", title=title, axis=labels())
        log = bool(values) and all(each > 0 for each in values)
        scale = alt.Scale(type="log", nice=False, padding=12) if log else alt.Undefined
        return channel(f"{key}:Q", title=title, scale=scale)

    place, vertical = axis("x", over, alt.X), axis("y", what, alt.Y)
    models = list(dict.fromkeys(record["models"] for record in records))
    legend = alt.Legend() if others else None
    colour = alt.Color("models:N", title=None, sort=None, scale=graded(models), legend=legend)
    base = alt.Chart(data(records)).encode(x=place, color=colour)
    means = base.mark_line().encode(y=vertical.aggregate("mean"))
    return alt.layer(means, base.mark_point(filled=True, size=24).encode(y=vertical)).properties(width=420, height=260)


SYMBOLS = {
    "lambda_max": "λ_max",
    "lambda_min": "λ_min",
    "frobenius": "‖H‖_F",
    "trace": "tr H",
    "parameters": "parameters N",
    "samples": "samples D",
    "loss": "training loss",
}


def _words(column: str) -> str:
    """A column's name as a reader says it."""
    return SYMBOLS.get(column, printable(column.replace("_", " ")))


def _said(value: Any) -> str:
    """A setting as text."""
    return printable(str(value))


def _determined(values: Sequence[Any], by: Sequence[Any]) -> bool:
    """Whether equal values of one column always have equal values of the other."""
    return len(set(zip(by, values, strict=True))) == len(set(by))
