"""A chart as content of a page, where the packages that draw it are installed."""

from __future__ import annotations

from collections.abc import Callable

from curvlens.analysis import charts
from curvlens.report.content import Content, VegaChart


def chart(label: str, make: Callable[[], charts.Spec]) -> list[Content]:
    """A chart; none where the packages that draw it are not installed."""
    return [VegaChart(make(), label)] if charts.available() else []
