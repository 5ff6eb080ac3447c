"""Charts as plain numbers: a chart is a row of panels with curves, or with a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Curve:
    """A line through points, with a band of uncertainty; a missing point is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int = 0
    """Index into the palette."""
    style: Literal["solid", "dashed", "dotted", "steps", "bars"] = "solid"
    marker: bool = True


@dataclass(frozen=True)
class Slope:
    """A line of a predicted power, through a point of the chart."""

    power: float
    x: tuple[float, float]
    """First and last x of the line."""
    at: tuple[float, float]
    """A point on the line."""
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    curves: Sequence[Curve] = ()
    slopes: Sequence[Slope] = ()
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    lines: Sequence[float] = ()
    """Places on the x axis with a thin vertical line."""
    y_lines: Sequence[float] = ()
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    """Places and names on the x axis."""
    legend: bool = True
    note: str = ""
    """A text instead of axes. A panel with a note has no curves, but keeps its place in the row."""


@dataclass(frozen=True)
class Heat:
    """A matrix as colours, with names for groups of its rows and columns."""

    matrix: Sequence[Sequence[float]]
    title: str = ""
    label: str = ""
    """The range of the colours."""
    groups: Sequence[str] = ()
    """Equal parts of rows and columns, in order."""
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """A figure."""

    name: str
    """The name of its files."""
    title: str
    caption: str
    panels: Sequence[Panel | Heat] = field(default=())
    columns: int = 2
    """The largest number of panels in a row."""
