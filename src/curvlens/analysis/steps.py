"""Optimisers at this point for the document: their edge of stability, and how far along their step the loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvlens.analysis.estimates import enclosed
from curvlens.analysis.known import Known

Plain = Mapping[str, Any]


def optimisers(known: Known) -> dict[str, Any]:
    """``stability`` of the optimiser given, ``adam`` with g² for its second moments, and gradient ``descent``."""
    found: dict[str, Any] = {}
    for kind in ("stability", "adam"):
        record = known.last(kind)
        if record is not None:
            found[kind] = edge(record.result)
            if kind == "adam" and found[kind]["ratio"] > found[kind]["residual"]:
                found[kind]["largest_rate"] = _rate(record.config["lr"], record.result)
    descent = known.last("descent")
    if descent is not None:
        found["descent"] = step(descent.result)
    return found


def edge(result: Plain) -> dict[str, Any]:
    """An optimiser with its edge, its sharpness as a number with its bound, and its step."""
    found = {name: value for name, value in result.items() if name not in ("update", "provenance")}
    if found.get("sharpness") is not None:
        found["preconditioned"] = enclosed(found["sharpness"], found["residual"] * found["threshold"])
    if result.get("update"):
        found["step"] = step(result["update"])
    return found


def step(update: Plain) -> dict[str, Any]:
    """Multiples of a step: where the loss rises again by the quadratic model, and by the losses along it.

    ``measured`` lies between two multiples that were computed. It is left out where the loss did not rise again up to
    ``searched``, where the step climbs, and where the loss changes by no more than rounding.
    """
    line = update["line"]
    length, start = line["norm"], _at_zero(line)
    along = [(t / length, loss) for t, loss in zip(line["radii"], line["losses"], strict=True) if t > 0]
    finite = [loss for _, loss in along if loss is not None]
    fall = start - min(finite, default=start)
    certain = fall > line["agreement"] * line["floor"]
    found = {
        "critical": update["critical"],
        "sharpness": update["sharpness"],
        "slope": update["slope"],
        "curvature": update["curvature"],
        "climbs": update["slope"] <= 0,
        "fall": fall,
        "certain": certain,
        "searched": max((s for s, _ in along), default=0.0),
        "measured": None,
    }
    if update["measured"] and certain:
        below = [s for s, loss in along if s <= update["measured"] and loss is not None and loss < start]
        above = [s for s, loss in along if s >= update["measured"] and (loss is None or loss >= start)]
        low, high = max(below, default=0.0), min(above, default=math.inf)
        if math.isfinite(high):
            found["measured"] = enclosed((low + high) / 2, (high - low) / 2)
    return found


def _at_zero(line: Plain) -> float:
    return float(next(loss for t, loss in zip(line["radii"], line["losses"], strict=True) if not t))


def _rate(rate: float, result: Plain) -> dict[str, Any]:
    """The largest stable learning rate: that of the measurement over the share of the edge that it reaches."""
    ratio, residual = result["ratio"], result["residual"]
    low, high = rate / (ratio + residual), rate / (ratio - residual)
    return {"value": rate / ratio, "bound": (high - low) / 2, "low": low, "high": high, "exact": False}
