"""The tree of a profile as a still icicle. The one that can be zoomed into is `curvlens.report.icicle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import BLUE, GAP, INK, ORANGE, SIGNED, altair, data
from curvlens.results import Estimate, Profile


def modules(result: Profile, quantity: str = "share", deep: int = 4) -> Any:
    """An icicle: left the two parts of the Hessian, right the functional part module by module, at full height.

    The height of a module is what the own code of all modules in it has, added up without signs; its colour is its
    total. An ``.html`` file can be zoomed into.
    """
    if getattr(result.hessian, quantity, None) is None:
        known = [name for name in ("share", "trace", "frobenius", "top") if getattr(result.hessian, name, None)]
        raise CurvlensError(f"quantity={quantity!r}: the profile has {', '.join(map(repr, known))}.")
    alt = altair()
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
    scale = alt.Scale(domain=[-size, size], **SIGNED)
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
    alt = altair()
    base = alt.Chart(data(records))
    low = min((record["y2"] for record in records), default=-1.0)
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[low, 0], nice=False, zero=False))
    cells = base.mark_rect(stroke=GAP).encode(
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
