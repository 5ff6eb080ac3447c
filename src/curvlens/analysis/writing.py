"""What the page and its figures take: a first figure is drawn before the work, to know."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from curvlens.analysis import charts, figures
from curvlens.blocks import Block

CHARTS = 16
"""Charts on a page and in files that take about as long as a heat map."""
DRAWN, PLAIN = 165 << 20, 24 << 20
"""Bytes of a page with charts, most of them for the JavaScript engine that draws, and of one without, with what an
analysis of any size takes, as code that loads at first use."""


@dataclass(frozen=True)
class Writing:
    """What it takes."""

    seconds: float
    memory: int


def rehearsed(blocks: Iterable[Block]) -> Writing:
    """Draw a heat map of these blocks without numbers. What loads at first use is loaded then, and no longer counts."""
    if not charts.available():
        return Writing(0.2, PLAIN)
    found = [{"name": block.name, "layer": block.layer, "role": block.role} for block in blocks]
    figures.prepare()
    start = time.perf_counter()
    figures.drawn(figures.heat({"cells": {"H": {"trace": {}}}, "blocks": found}, "H", "trace"))
    return Writing(CHARTS * (time.perf_counter() - start), DRAWN)
