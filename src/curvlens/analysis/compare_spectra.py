"""The spectra of an analysis, as a comparison draws them: curves by decade, atoms, and computed eigenvalues."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from curvlens.analysis.differences import exactly, number
from curvlens.analysis.extremes import WIDTH

Document = Mapping[str, Any]


def spectra(document: Document) -> dict[str, Any]:
    """Densities of the whole, as share by decade, and eigenvalues."""
    spectrum, densities = document["spectrum"], dict[str, Any]()
    found = spectrum.get("densities")
    for each in found if isinstance(found, list) else ():
        if (
            not isinstance(each, Mapping)
            or each.get("role")
            or each.get("block")
            or each.get("operator") not in ("H", "G")
        ):
            continue
        x, share = _floats(each.get("x")), _floats(each.get("share"))
        low, high, n = _floats(each.get("low")), _floats(each.get("high")), exactly(each.get("n"))
        if len(x) == len(share) + 1 == len(low) + 1 == len(high) + 1 and n is not None and n["value"] >= 1:
            marked = _marked(each)
            zeros = _zeros(each) if any(not atom["at"] for atom in marked) else []
            drawn = _by_decade(x, *_without(zeros, x, share, low, high))
            drawn["middle"] += math.fsum(mass for _, mass in zeros)
            densities[each["operator"]] = drawn | {"n": n["value"], "marked": marked}
    eigenvalues = spectrum.get("eigenvalues")
    eigenvalues = eigenvalues if isinstance(eigenvalues, Mapping) else {}
    values = {
        letter: [known for each in eigenvalues[letter] if (known := number(each)) is not None]
        for letter in ("H", "G")
        if isinstance(eigenvalues.get(letter), list)
    }
    return {"densities": densities, "eigenvalues": values}


def _marked(density: Document) -> list[dict[str, Any]]:
    """Values that many eigenvalues share: where, and at least which share, with its error."""
    found = density.get("marked")
    atoms = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    known = [(exactly(each.get("at")), number(each)) for each in atoms]
    return [{"at": at["value"], **share} for at, share in known if at is not None and share is not None]


def _zeros(density: Document) -> list[tuple[float, float]]:
    """Where a computed spectrum has the eigenvalues that are 0, by rounding beside it, and their shares."""
    found = density.get("atoms")
    pairs = [_floats(each) for each in found] if isinstance(found, list) else []
    largest = max((abs(each) for each in _floats(density.get("x"))), default=0.0)
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and abs(pair[0]) <= WIDTH * largest]


def _without(
    zeros: Sequence[tuple[float, float]], x: Sequence[float], *curves: Sequence[float]
) -> Iterator[list[float]]:
    """Curves over bins without the eigenvalues that are 0. Those in bins that end at 0 are in no curve."""
    taken = [0.0] * (len(x) - 1)
    for value, mass in zeros:
        place = bisect_left(x, value) - 1
        if 0 <= place < len(taken):
            taken[place] += mass
    for curve in curves:
        yield [max(part - less, 0.0) for part, less in zip(curve, taken, strict=True)]


def _by_decade(
    x: Sequence[float], share: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> dict[str, Any]:
    """Shares divided by the width of their bin in decades, so that grids may differ; bins at 0 have no such width."""
    bins, middle = [], 0.0
    for i, part in enumerate(share):
        if x[i] * x[i + 1] > 0 and x[i + 1] > x[i]:
            width = abs(math.log10(x[i + 1] / x[i]))
            bins.append([x[i], x[i + 1], part / width, low[i] / width, high[i] / width])
        else:
            middle += part
    return {"bins": bins, "middle": middle}


def _floats(found: object) -> list[float]:
    values = [exactly(each) for each in found] if isinstance(found, list) else []
    return [each["value"] for each in values if each is not None]
