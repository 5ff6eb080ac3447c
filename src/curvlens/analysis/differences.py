"""Differences of two measured numbers, with their errors.

Standard errors add in quadrature, bounds of eigenvalues add up. The 95 % interval of a difference follows from the two
intervals (Zou & Donner, 2008): the distances of the ends from the values add in quadrature, each on its side. So the
few samples of a cell, or a skewed interval, count as they should.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from curvlens.dynamics.advice import short

Number = Mapping[str, Any]
"""A number of an analysis: value, and stderr or bound, and the ends of its 95 % interval."""
SIGMAS = 2.0
"""A difference below so many errors is no change."""
BY_CHANCE = 0.05
"""The share of differences that are beyond 2 σ although nothing changed."""
LARGEST = 1e150
"""Larger numbers are none: their squares overflow."""
ROUNDING = {"float64": 1e-12, "float32": 1e-5}
"""Relative differences below this are rounding. Half precision: 1 %."""


def number(found: object) -> dict[str, Any] | None:
    """A number of a document, or None if it has no finite value."""
    if not isinstance(found, Mapping) or finite(found.get("value")) is None:
        return None
    error = "bound" if "bound" in found else "stderr"
    known = {"value": float(found["value"])} | {
        key: finite(found[key]) for key in (error, "low", "high") if key in found
    }
    return known | {"exact": found.get("exact") is True}


def exactly(found: object) -> dict[str, Any] | None:
    """A number that was computed without sampling, as the loss."""
    return (
        None
        if finite(found) is None
        else number({"value": found, "stderr": 0.0, "low": found, "high": found, "exact": True})
    )


def error_of(found: Number) -> float | None:
    """The standard error or bound; None if it is not known."""
    error = found.get("bound", found.get("stderr"))
    return 0.0 if found["exact"] else None if error is None else abs(error)


def quotient(above: Number, below: Number, offset: float = 0.0) -> dict[str, Any] | None:
    """above / below + offset, of independent estimates, by the first order of their errors."""
    errors = error_of(above), error_of(below)
    if not below["value"] or errors[0] is None or errors[1] is None:
        return None
    ratio = above["value"] / below["value"]
    stderr = math.hypot(errors[0], ratio * errors[1]) / abs(below["value"])
    value = ratio + offset
    return {
        "value": value,
        "stderr": stderr,
        "low": value - 2 * stderr,
        "high": value + 2 * stderr,
        "exact": not stderr,
    }


def difference(one: Number, other: Number, rounding: float = 0.0) -> dict[str, Any]:
    """other − one: value, error, ends of its interval, ratio, and whether it is clear of the errors.

    The ratio is None if a value is within twice its error of 0, or if the signs differ.

    ``clear`` is True if the difference is larger than twice its error and its 95 % interval excludes 0, and None if an
    error is not known.

    >>> a, b = number({"value": 10.0, "stderr": 0.3}), number({"value": 12.0, "stderr": 0.4})
    >>> found = difference(a, b)
    >>> found["value"], found["stderr"], found["ratio"], found["clear"]
    (2.0, 0.5, 1.2, True)
    """
    value, errors = other["value"] - one["value"], (error_of(one), error_of(other))
    below, above = _ends(one), _ends(other)
    bounded = "bound" in one or "bound" in other
    add = _sum if bounded else math.hypot
    down, up = add(above[0], below[1]), add(above[1], below[0])
    known = errors[0] is not None and errors[1] is not None
    error = add(errors[0] or 0.0, errors[1] or 0.0) if known else None
    clear = None
    if error is not None:
        size, toward = abs(value), down if value > 0 else up
        largest = max(abs(one["value"]), abs(other["value"]))
        clear = size > SIGMAS * error and size > toward and size > rounding * largest
    return {
        "value": value,
        "bound" if bounded else "stderr": error,
        "low": finite(value - down) if known else None,
        "high": finite(value + up) if known else None,
        "exact": error == 0.0,
        "ratio": other["value"] / one["value"] if _has_ratio(one, other) else None,
        "clear": clear,
    }


def clear_among(found: Number, cells: int) -> bool:
    """Whether a difference is clear although it was chosen among many: its interval is widened for all (Bonferroni)."""
    if not found["clear"]:
        return False
    end = found["low"] if found["value"] > 0 else found["high"]
    wider = NormalDist().inv_cdf(1 - BY_CHANCE / 2 / max(cells, 1)) / NormalDist().inv_cdf(1 - BY_CHANCE / 2)
    widened = 1.0 if "bound" in found else wider
    return end is not None and abs(found["value"]) > widened * abs(found["value"] - end)


def rounding_of(dtypes: Sequence[str]) -> float:
    """The coarsest rounding of some dtypes."""
    return max(ROUNDING.get(dtype, 1e-2) for dtype in dtypes)


def said(found: Number, digits: int = 3) -> str:
    """A number with its error, if it has one that shows.

    >>> said({"value": 12.134, "stderr": 0.21, "exact": False}), said({"value": 12.134, "bound": 1e-9, "exact": False})
    ('12.1 ± 0.21', '12.1')
    """
    error = error_of(found)
    if error is None or error < 5e-4 * abs(found["value"]) or not error:
        return short(found["value"], digits)
    return f"{short(found['value'], digits)} ± {short(error, 2)}"


def signed(found: Number) -> str:
    """A difference, with its sign."""
    return f"{'+' if found['value'] > 0 else ''}{said(found)}"


def _has_ratio(one: Number, other: Number) -> bool:
    """Both of one sign, and none within its error of 0."""
    apart = all(abs(each["value"]) > SIGMAS * (error_of(each) or 0.0) for each in (one, other))
    return apart and (one["value"] > 0) == (other["value"] > 0)


def _ends(found: Number) -> tuple[float, float]:
    """The distances of the ends of the 95 % interval, below and above."""
    if found["exact"]:
        return 0.0, 0.0
    error = error_of(found)
    default = math.inf if error is None else error * (1.0 if "bound" in found else SIGMAS)
    if "low" not in found or "high" not in found:
        return default, default
    low, high = found["low"], found["high"]
    below = math.inf if low is None else max(found["value"] - low, 0.0)
    return below, math.inf if high is None else max(high - found["value"], 0.0)


def _sum(one: float, other: float) -> float:
    return one + other


def finite(found: object) -> float | None:
    """A number of a document as a float; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    try:
        plain = float(found)
    except OverflowError:
        return None
    return plain if abs(plain) < LARGEST else None  # False for NaN
