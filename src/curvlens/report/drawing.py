"""Charts as files: SVG and PNG, the same bytes for the same numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

from curvlens.errors import CurvlensError
from curvlens.report.charts import Chart, Curve, Heat, Panel, Slope
from curvlens.report.compact import compact

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which people with any colour vision can tell apart."""
MARKERS = "os^Dv<>"
GREY = "#777777"
MARK = "curvlens"
"""The creator, in every PNG file."""
_SOURCES = (Path(__file__), Path(__file__).with_name("compact.py"))
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "curvlens",
    "svg.fonttype": "none",
}


def fingerprint(chart: Chart) -> str:
    """A digest of everything that the files of a chart depend on. If it is unchanged, they are not drawn again."""
    try:
        library = version("matplotlib")
    except PackageNotFoundError:
        library = "none"  # `draw` raises the error
    sources = (source.read_text(encoding="utf-8") for source in _SOURCES)
    return sha256("\0".join((repr(chart), *sources, library)).encode()).hexdigest()


def draw(chart: Chart) -> dict[str, bytes]:
    """The contents of ``name.svg`` and ``name.png``."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CurvlensError("Figures need matplotlib. In a clone, install it with: pip install '.[papers]'.") from error
    with matplotlib.rc_context(_STYLE):
        count = len(chart.panels)
        across = min(chart.columns, count)
        down = -(-count // across)
        width = 3.7 * across + 0.4 if across > 1 else 6.4
        figure = Figure(figsize=(width, 2.9 * down + 0.4 if across > 1 else 3.8 * down), layout="constrained")
        FigureCanvasAgg(figure)
        for place, panel in enumerate(chart.panels, start=1):
            axes = figure.add_subplot(down, across, place)
            if isinstance(panel, Heat):
                _heat(figure, axes, panel)
            else:
                _panel(axes, panel)
        figure.suptitle(textwrap.fill(chart.title, int(11 * width)), fontsize=10.5)
        figure.draw_without_rendering()
        for axes in figure.axes:
            if axes.get_legend() is not None and _hides(axes):
                _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        svg, png = BytesIO(), BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": MARK})
        figure.savefig(png, format="png", dpi=130, metadata={"Software": MARK})
    return {f"{chart.name}.svg": compact(svg.getvalue()), f"{chart.name}.png": png.getvalue()}


def _panel(axes: Any, panel: Panel) -> None:
    if panel.note:
        axes.set_axis_off()
        axes.set_title(panel.title)
        text = "\n".join(filter(None, (panel.y_label, panel.note)))
        axes.text(0.5, 0.5, text, color=GREY, ha="center", va="center", transform=axes.transAxes)
        return
    bars = [curve for curve in panel.curves if curve.style == "bars"]
    for number, curve in enumerate(bars):
        _bars(axes, curve, (number + 0.5) / len(bars) - 0.5, 0.8 / len(bars))
    for curve in panel.curves:
        if curve.style != "bars":
            _curve(axes, curve, panel)
    for slope in panel.slopes:
        _slope(axes, slope)
    for place in panel.lines:
        axes.axvline(place, color=GREY, linewidth=0.7, linestyle=":")
    for place in panel.y_lines:
        axes.axhline(place, color=GREY, linewidth=0.7, linestyle=":")
    axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    _plain_numbers(axes, panel)
    if panel.ticks is not None:
        axes.set_xticks(*panel.ticks)
        axes.set_xticks([], minor=True)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.legend and any(curve.label for curve in panel.curves):
        _legend(axes)


def _legend(axes: Any, **place: Any) -> None:
    axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.75, handlelength=1.8, **place)


def _hides(axes: Any) -> bool:
    """Whether the legend hides a curve, a band or a bar: matplotlib's "best" place ignores bands."""
    box = axes.get_legend().get_window_extent()
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines if line.get_color() != GREY]
    areas = [band.get_transform().transform_path(path) for band in axes.collections for path in band.get_paths()]
    areas += [bar.get_transform().transform_path(bar.get_path()) for bar in axes.patches]
    return any(
        path.cleaned(remove_nans=True).intersects_bbox(box, filled)
        for paths, filled in ((lines, False), (areas, True))
        for path in paths
    )


def _plain_numbers(axes: Any, panel: Panel) -> None:
    """3, not 3 × 10⁰, on logarithmic axes of few decades."""
    for scale, axis in ((panel.x_scale, axes.xaxis), (panel.y_scale, axes.yaxis)):
        low, high = axis.get_view_interval()
        if scale == "log" and low > 1e-3 and high < 1e4 and high < 300 * low:
            shown = "235" if high < 30 * low else ""  # leading digits between the decades
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _, shown=shown: f"{value:g}" if f"{value:e}"[0] in shown else "")


def _bars(axes: Any, curve: Curve, beside: float, width: float) -> None:
    """Bars at their places, beside those of other curves."""
    error = None
    if curve.low is not None and curve.high is not None:
        error = [
            [y - low for y, low in zip(curve.y, curve.low, strict=True)],
            [high - y for y, high in zip(curve.y, curve.high, strict=True)],
        ]
    places = [x + 0.8 * beside for x in curve.x]
    colour = PALETTE[curve.colour % len(PALETTE)]
    axes.bar(places, curve.y, yerr=error, color=colour, label=curve.label, width=width, capsize=2)


def _curve(axes: Any, curve: Curve, panel: Panel) -> None:
    colour = PALETTE[curve.colour % len(PALETTE)]
    if curve.style == "steps":
        axes.stairs(curve.y, curve.x, color=colour, label=curve.label, fill=True, alpha=0.35)
        axes.stairs(curve.y, curve.x, color=colour)
        return
    y = [_shown(value, panel.y_scale) for value in curve.y]
    axes.plot(
        curve.x,
        y,
        color=colour,
        linestyle={"solid": "-", "dashed": "--", "dotted": ":"}[curve.style],
        marker=MARKERS[curve.colour % len(MARKERS)] if curve.marker else None,
        markersize=3,
        label=curve.label,
    )
    if curve.low is not None and curve.high is not None:
        low = [_shown(value, panel.y_scale) for value in curve.low]
        high = [_shown(value, panel.y_scale) for value in curve.high]
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.2, linewidth=0)


def _shown(value: float, scale: str) -> float:
    """NaN, which leaves a gap, for values that a logarithmic axis cannot show."""
    return math.nan if scale == "log" and not value > 0 else value


def _slope(axes: Any, slope: Slope) -> None:
    x0, y0 = slope.at
    ys = [y0 * (x / x0) ** slope.power for x in slope.x]
    falls = slope.power < 0  # from where the axis has its numbers: in the legend there is room for its name
    axes.plot(slope.x, ys, color=GREY, linestyle="--", linewidth=0.9, zorder=1, label=slope.label if falls else None)
    if slope.label and not falls:  # at the left end, below the line: others meet at the right
        axes.annotate(
            slope.label, (slope.x[0], ys[0]), color=GREY, fontsize=7.5, xytext=(4, -6), textcoords="offset points"
        )


def _heat(figure: Any, axes: Any, panel: Heat) -> None:
    low, high = panel.limits or _range(panel.matrix)
    image = axes.imshow(panel.matrix, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    if panel.groups:
        size = len(panel.matrix) / len(panel.groups)
        places = [size * (i + 0.5) - 0.5 for i in range(len(panel.groups))]
        turned = 35 if max(map(len, panel.groups)) > 6 else 0
        axes.set_xticks(places, panel.groups, rotation=turned)
        axes.set_yticks(places, panel.groups)
        axes.tick_params(length=0)
        for edge in range(1, len(panel.groups)):
            axes.axhline(size * edge - 0.5, color="white", linewidth=0.8)
            axes.axvline(size * edge - 0.5, color="white", linewidth=0.8)
    axes.set_title(panel.title)
    figure.colorbar(image, ax=axes, label=panel.label, shrink=0.85)


def _range(matrix: Sequence[Sequence[float]]) -> tuple[float, float]:
    finite = [value for row in matrix for value in row if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)
