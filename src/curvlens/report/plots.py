"""``result.plot()``: a picture of each kind of result, as an Altair chart.

One colour for one part on every picture: H ink, G blue, F orange. Sizes are on a logarithm. Numbers of both signs are
on one that is mirrored at 0. What is uncertain looks so: bands, whiskers, marks in cells.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.errors import CurvlensError, a_kind, printable
from curvlens.report.icicle import icicle
from curvlens.results import ByBlock, Density, Eigs, Estimate, Profile, Propagation, Result, Solution

INK, BLUE, ORANGE = "#3b4252", "#0072b2", "#d55e00"
PARTS = {"hessian": INK, "ggn": BLUE, "functional": ORANGE}
CELL = 26
"""Pixels of a cell of a heat map."""
MOST_BLOCKS = 24
"""Blocks that the masses of eigenvectors are shown for: the heaviest."""
UNSURE, VERY_UNSURE = 0.25, 0.5
"""Relative errors above which a cell is marked, with a dot or with a stroke."""
OUTSIDE = "outside of layers"
KINDS = ("svg", "png", "pdf", "html", "json")


def plot(result: Result, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """A picture of a result, an ``altair.Chart``; also written to a file if a path is given.

    Blocks: a heat map, layer × role, or layer × head for ``by="head"``. Eigenvalues and densities: histogram, sorted,
    cumulative. Of `Eigs`, ``what="mass"`` shows in which blocks the vectors live. Propagation: curves over the layers;
    ``quantity`` is trace, frobenius, top or bottom. A profile written to an ``.html`` file is the icicle.
    """
    kind = _kind(path)
    if isinstance(result, Profile) and kind == "html":
        assert path is not None
        files.replace(Path(path), icicle(result, **options).encode())
        return None
    for known, draw in _DRAWN.items():
        if isinstance(result, known):
            chart = _styled(draw(result, **options))
            if path is not None and kind is not None:
                _write(chart, Path(path), kind)
            return chart
    raise CurvlensError(f"There is no picture of {a_kind(result)}.")


def _altair() -> Any:
    try:
        import altair
    except ImportError as error:
        raise CurvlensError("plot() needs Altair. Install it: pip install 'curvlens[report]'.") from error
    return altair


def _kind(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise CurvlensError(f"{os.fspath(path)!r} is no name of a picture: it has to end in .{', .'.join(KINDS)}.")
    if not Path(path).parent.is_dir():
        raise CurvlensError(f"There is no folder {str(Path(path).parent)!r} for {Path(path).name!r}.")
    return kind


def _write(chart: Any, path: Path, kind: str) -> None:
    """Pictures are made in memory and put in their place at once."""
    try:
        import vl_convert
    except ImportError as error:
        raise CurvlensError("Pictures need vl-convert. Install it: pip install 'curvlens[report]'.") from error
    spec = chart.to_dict(validate=False)
    made: dict[str, Callable[[], str | bytes]] = {
        "svg": lambda: vl_convert.vegalite_to_svg(spec),
        "png": lambda: vl_convert.vegalite_to_png(spec, scale=2),
        "pdf": lambda: vl_convert.vegalite_to_pdf(spec),
        "html": lambda: _page(spec, vl_convert.javascript_bundle()),  # type: ignore[call-arg]
        "json": lambda: json.dumps(spec, indent=1) + "\n",
    }
    content = made[kind]()
    files.replace(path, content.encode() if isinstance(content, str) else content)


def _page(spec: dict[str, Any], script: str) -> str:
    """One page: no request can leave it, and names in the data are data."""
    # Inside a script element only "<" could end it.
    data = json.dumps(spec, allow_nan=False).replace("<", "\\u003c")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>curvlens</title>
</head>
<body>
<div id="chart"></div>
<script>{script}</script>
<script id="spec" type="application/json">{data}</script>
<script>
const spec = JSON.parse(document.getElementById("spec").textContent);
vegaEmbed("#chart", spec, {{ast: true, renderer: "svg", actions: false}});
</script>
</body>
</html>
"""


def _styled(chart: Any) -> Any:
    return (
        chart.configure_view(stroke=None)
        .configure_axis(
            labelColor=INK, titleColor=INK, titleFontWeight="normal", gridColor="#e5e9f0", domainColor="#aeb6c4"
        )
        .configure_title(anchor="start", color=INK, fontWeight="normal", fontSize=12)
        .configure_legend(titleFontWeight="normal", labelColor=INK, titleColor=INK)
    )


def _data(records: Sequence[dict[str, Any]]) -> Any:
    """Records as they are; no number that JSON does not have."""
    clean = [
        {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        for record in records
    ]
    return _altair().Data(values=clean)


# One estimate for each block


def _blocks(result: ByBlock) -> Any:
    """A heat map for blocks of layers, bars for everything else."""
    records = [_record(result, name, estimate) for name, estimate in result.items()]
    if result.by == "head":
        heads = [record for record in records if record["head"] is not None]
        if heads:
            return _heads(result, heads)
    if result.by == "block" and sum(record["layer"] is not None for record in records) > 1:
        return _layers(result, records)
    return _bars(result, records)


def _record(result: ByBlock, name: str, estimate: Estimate) -> dict[str, Any]:
    layer, role, head = result.place(name)
    value, error = float(estimate), float(estimate.stderr)
    known = estimate.measured and math.isfinite(value)
    share = abs(error / value) if known and value else 0.0
    mark = "×" if not known else "╱" if share > VERY_UNSURE else "·" if share > UNSURE else ""
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
        "mark": mark,
    }


def _colours(title: str, records: Sequence[dict[str, Any]]) -> Any:
    """On a logarithm for numbers above 0, and mirrored at 0 for those of both signs."""
    alt = _altair()
    values = [record["value"] for record in records if record["value"] is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0:
        scale = alt.Scale(type="log", scheme="viridis", reverse=False)
    elif low < 0:
        size = max(abs(low), abs(high))
        least = min((abs(x) for x in values if x), default=1.0)
        scale = alt.Scale(type="symlog", constant=max(least, size * 1e-4), scheme="blueorange", domain=[-size, size])
    else:
        scale = alt.Scale(type="symlog", constant=max(high * 1e-4, 1e-300), scheme="viridis")
    return alt.Color("value:Q", title=title, scale=scale, legend=alt.Legend(format=".1e", gradientLength=140))


def _cells(records: Sequence[dict[str, Any]], x: Any, y: Any, colour: Any, size: tuple[int, int]) -> Any:
    alt = _altair()
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in (("name", "block"), ("said", "value"))]
    tooltip.append(alt.Tooltip("samples:Q", title="samples"))
    base = alt.Chart(_data(records)).encode(x=x, y=y, tooltip=tooltip)
    cells = base.mark_rect(stroke="white", strokeWidth=1, invalid=None).encode(
        color=alt.condition("isValid(datum.value)", colour, alt.value("#eceff4"))
    )
    marks = base.mark_text(color="white", stroke=INK, strokeWidth=0.3, fontSize=13).encode(text="mark:N")
    return alt.layer(cells, marks).properties(width=CELL * size[0], height=CELL * size[1])


def _layers(result: ByBlock, records: Sequence[dict[str, Any]]) -> Any:
    """Layer × role; what is outside of layers in a column of its own, on the same colours."""
    alt = _altair()
    colour = _colours(printable(result.what), records)
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
    alt = _altair()
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
    alt = _altair()
    y = alt.Y("name:N", sort=[record["name"] for record in records], title=None)
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip("said:N", title=printable(result.what))]
    base = alt.Chart(_data(records)).encode(y=y, tooltip=tooltip)
    bars = base.mark_bar(color=BLUE, height={"band": 0.7}).encode(x=alt.X("value:Q", title=printable(result.what)))
    return alt.layer(bars, base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")).properties(width=420)


# Spectra


def _eigenvalues(result: Eigs, what: str = "values", by: str = "block") -> Any:
    if what == "mass":
        return _mass(result, by)
    if what != "values":
        raise CurvlensError(f"what={what!r}, expected 'values' or 'mass'.")
    records = [
        {"rank": i + 1, "value": value, "low": value - r, "high": value + r, "share": (i + 1) / len(result)}
        for i, (value, r) in enumerate(zip(result.values.tolist(), result.residuals.tolist(), strict=True))
    ]
    alt = _altair()
    base = alt.Chart(_data(records)).properties(width=230, height=180)
    x = alt.X("value:Q", title="eigenvalue")
    histogram = base.mark_bar(color=INK).encode(
        x=alt.X("value:Q", bin=alt.Bin(maxbins=30), title="eigenvalue"), y=alt.Y("count()", title="how many")
    )
    sides = base.encode(x=alt.X("rank:Q", title="rank"))
    ranked = alt.layer(
        sides.mark_rule(color=BLUE).encode(y="low:Q", y2="high:Q"),
        sides.mark_point(color=INK, filled=True, size=30).encode(
            y=alt.Y("value:Q", title="eigenvalue"), tooltip=["rank:Q", "value:Q"]
        ),
    )
    steps = base.mark_line(color=INK, interpolate="step-after").encode(x=x, y=alt.Y("share:Q", title="share up to it"))
    return alt.hconcat(
        histogram.properties(title="histogram"), ranked.properties(title="sorted"), steps.properties(title="cumulative")
    )


def _mass(result: Eigs, by: str) -> Any:
    """Where each eigenvector lives: the share of each block."""
    shares = result.mass(by)  # type: ignore[arg-type]
    heaviest = sorted(shares, key=lambda name: -max(shares[name]))[:MOST_BLOCKS]
    order = [name for name in shares if name in heaviest]
    values = [f"{i + 1}: {value:.4g}" for i, value in enumerate(result.values.tolist())]
    records = [
        {"block": printable(name), "eigenvalue": values[i], "share": share}
        for name in order
        for i, share in enumerate(shares[name])
    ]
    alt = _altair()
    return (
        alt.Chart(_data(records))
        .mark_rect(stroke="white")
        .encode(
            x=alt.X("eigenvalue:N", sort=values, title="eigenvector, by its eigenvalue", axis=alt.Axis(labelAngle=-45)),
            y=alt.Y("block:N", sort=[printable(name) for name in order], title=None),
            color=alt.Color("share:Q", scale=alt.Scale(scheme="viridis", domain=[0, 1]), title="share"),
            tooltip=["block:N", "eigenvalue:N", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width=CELL * max(len(values), 4), height=18 * len(order))
    )


def _density(result: Density, points: int = 200) -> Any:
    """Histogram, sorted, cumulative: shares are of all eigenvalues."""
    alt = _altair()
    records = result.table(points)
    seen = [record["density"] for record in records if record["density"] > 0]
    floor = max(min(seen), 1e-6 * max(seen))
    for record in records:
        record["floor"] = floor
        record["density"] = max(record["density"], floor)
    base = alt.Chart(_data(records)).properties(width=230, height=180)
    x = alt.X("x:Q", title="eigenvalue")
    y = alt.Y("density:Q", stack=None, scale=alt.Scale(type="log", domainMin=floor, nice=False), title="density")
    curve = base.mark_area(color=BLUE, opacity=0.35, line={"color": BLUE}, clip=True).encode(x=x, y=y, y2="floor:Q")
    band = base.mark_area(color=BLUE, opacity=0.25).encode(x=x, y="low:Q", y2="high:Q")
    line = base.mark_line(color=INK).encode(x=x, y=alt.Y("cumulative:Q", title="share up to it"))
    rank = alt.X("cumulative:Q", title="share of eigenvalues", scale=alt.Scale(domain=[0, 1]))
    ranked = base.mark_line(color=INK).encode(
        x=rank,
        y=alt.Y("x:Q", title="eigenvalue", scale=alt.Scale(type="symlog", constant=_constant(result))),
        order="x:Q",
    )
    return alt.hconcat(
        curve.properties(title="density"),
        ranked.properties(title="sorted"),
        alt.layer(band, line).properties(title="cumulative"),
    )


def _constant(result: Density) -> float:
    """Below which a symmetric logarithm is linear: a thousandth of the largest eigenvalue."""
    return max(float(result.nodes.abs().max()) * 1e-3, 1e-300)


# Others


def _curves(result: Propagation, quantity: str = "trace") -> Any:
    alt = _altair()
    if quantity not in ("trace", "frobenius", "top", "bottom"):
        raise CurvlensError(f"quantity={quantity!r}, expected 'trace', 'frobenius', 'top' or 'bottom'.")
    records = [
        {
            "level": printable(record[result.by]),
            "of": f"by {record['of']}",
            "part": record["part"],
            "value": record[quantity],
            "low": record[quantity] - record[f"{quantity}_error"],
            "high": record[quantity] + record[f"{quantity}_error"],
        }
        for record in result.table()
        if record[quantity] is not None
    ]
    levels = [printable(name) for name in result.levels]
    colour = alt.Color("part:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())), title=None)
    charts = []
    for side in dict.fromkeys(record["of"] for record in records):
        own = [record for record in records if record["of"] == side]
        base = alt.Chart(_data(own)).encode(x=alt.X("level:N", sort=levels, title=None), color=colour)
        lines = base.mark_line(point=True).encode(
            y=alt.Y("value:Q", title=quantity), tooltip=["level:N", "part:N", "value:Q"]
        )
        band = base.mark_rule().encode(y="low:Q", y2="high:Q")
        charts.append(alt.layer(band, lines).properties(title=side, width=max(160, 40 * len(levels)), height=200))
    return alt.hconcat(*charts)


def _history(result: Solution) -> Any:
    alt = _altair()
    return (
        alt.Chart(_data(result.table()))
        .mark_line(color=INK)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("residual:Q", title="relative residual", scale=alt.Scale(type="log")),
        )
        .properties(width=420, height=220)
    )


def _numbers(result: Estimate) -> Any:
    """A histogram of many numbers, as of a diagonal."""
    if result.value.ndim == 0:
        raise CurvlensError(f"The estimate is one number, {result}: there is nothing to draw.")
    alt = _altair()
    return (
        alt.Chart(_data([{"value": value} for value in result.value.reshape(-1).tolist()]))
        .mark_bar(color=INK)
        .encode(
            x=alt.X("value:Q", bin=alt.Bin(maxbins=60), title="value"),
            y=alt.Y("count()", scale=alt.Scale(type="symlog"), title="how many"),
        )
        .properties(width=420, height=220)
    )


def _tree(result: Profile, quantity: str = "share", deep: int = 4) -> Any:
    """An icicle: left the two parts of the Hessian, right the functional part module by module, at full height.

    The height of a module is what the own code of all modules in it has, added up without signs; its colour is its
    total. An ``.html`` file can be zoomed into.
    """
    if getattr(result.hessian, quantity, None) is None:
        known = [name for name in ("share", "trace", "frobenius", "top") if getattr(result.hessian, name, None)]
        raise CurvlensError(f"quantity={quantity!r}: the profile has {', '.join(map(repr, known))}.")
    alt = _altair()
    below = result.tree()
    heights: dict[str, float] = {}
    for row in reversed(list(result)):
        own = abs(float(getattr(row.own, quantity)))
        heights[row.path] = own + sum(heights[child.path] for child in below[row.path])
    parts = [("GGN", getattr(result.ggn, quantity), BLUE), ("functional", getattr(result[""].total, quantity), ORANGE)]
    left, y = list[dict[str, Any]](), 0.0
    for name, estimate, colour in parts:
        left.append(_cell(name, estimate, 0, y, abs(float(estimate)), quantity) | {"colour": colour})
        y += abs(float(estimate))
    right, todo = list[dict[str, Any]](), [("", 0, 0.0)]
    while todo:
        path, x, y = todo.pop()
        row = result[path]
        if path:
            label = row.name if heights[path] > 0.035 * heights[""] else ""
            right.append(_cell(label, getattr(row.total, quantity), x - 1, y, heights[path], quantity))
            right[-1]["name"] = printable(path)
        for child in below[path] if x < deep else ():
            todo.append((child.path, x + 1, y))
            y += heights[child.path]
    size = max((abs(record["value"]) for record in right), default=1.0) or 1.0
    for record in right:
        record["ink"] = "white" if abs(record["value"]) > 0.6 * size else INK
    scale = alt.Scale(scheme="blueorange", domain=[-size, size])
    colours = alt.Color("value:Q", title=quantity, scale=scale)
    charts = [_icicle(left, alt.Color("colour:N", scale=None)).properties(width=150, height=340, title="Hessian")]
    if right:
        charts.append(_icicle(right, colours).properties(width=620, height=340, title="functional part, by module"))
    return alt.hconcat(*charts).resolve_scale(color="independent")


def _cell(name: str, estimate: Estimate, x: int, y: float, height: float, quantity: str) -> dict[str, Any]:
    """A rectangle of an icicle, which grows downwards."""
    factor, unit = (100.0, " %") if quantity == "share" else (1.0, "")
    number = f"{estimate.short(factor, 3)[0]}{unit}"
    return {
        "x": x,
        "x2": x + 1,
        "y": -y,
        "y2": -(y + height),
        "middle": -(y + height / 2),
        "at": x + 0.04,
        "name": printable(name),
        "label": f"{printable(name)}  {number}" if name else "",
        "value": float(estimate),
        "said": f"{estimate}",
        "ink": "white",
    }


def _icicle(records: Sequence[dict[str, Any]], colour: Any) -> Any:
    alt = _altair()
    base = alt.Chart(_data(records))
    low = min((record["y2"] for record in records), default=-1.0)
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[low, 0], nice=False, zero=False))
    cells = base.mark_rect(stroke="white").encode(
        x=alt.X("x:Q", axis=None),
        x2="x2:Q",
        y=y,
        y2="y2:Q",
        color=colour,
        tooltip=[alt.Tooltip("name:N"), alt.Tooltip("said:N", title="value")],
    )
    text = base.mark_text(align="left", fontSize=11).encode(
        x="at:Q", y="middle:Q", text="label:N", color=alt.Color("ink:N", scale=None)
    )
    return alt.layer(cells, text).resolve_scale(color="independent")


_DRAWN: dict[type[Result], Callable[..., Any]] = {
    ByBlock: _blocks,
    Eigs: _eigenvalues,
    Density: _density,
    Propagation: _curves,
    Solution: _history,
    Profile: _tree,
    Estimate: _numbers,
}
