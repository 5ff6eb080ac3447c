"""Numbers as the page shows them: three digits, errors of two, and no error that the digits do not reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvlens.dynamics.advice import short
from curvlens.report.content import Number, Words


def number(cell: Mapping[str, Any] | None) -> Words:
    """A number with its error; empty if it is not known."""
    if not cell or cell.get("value") is None:
        return ""
    value = cell["value"]
    exact = " exact" if cell.get("exact") else ""
    return Number(f"{short(value)}{exact}", error(cell), _kept(value))


def plain(value: float | None, digits: int = 3) -> Words:
    """A number that has no error."""
    return "" if value is None else Number(short(value, digits), "", _kept(value))


def error(cell: Mapping[str, Any]) -> str:
    """The standard error or the bound, with two digits, if it changes one of the digits shown."""
    found = cell.get("bound", cell.get("stderr"))
    if cell.get("exact") or not found or found < 5e-4 * abs(cell["value"]):
        return ""
    return short(found, 2)


def said(cell: Mapping[str, Any]) -> str:
    """A number with its error, as a text."""
    found = error(cell)
    return f"{short(cell['value'])} ± {found}" if found else short(cell["value"])


def ends(cell: Mapping[str, Any]) -> tuple[float, float]:
    """The value minus and plus its error."""
    size = cell.get("bound", cell.get("stderr")) or 0.0
    return cell["value"] - size, cell["value"] + size


def _kept(value: float) -> float:
    """Six digits for sorting and copying; ``analysis.json`` has all of them."""
    return float(f"{value:.6g}")
