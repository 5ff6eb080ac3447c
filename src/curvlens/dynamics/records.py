"""Records of trained models, as users give them: their columns, their numbers and their seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind, listing, nearest
from curvlens.linalg.counted import whole
from curvlens.results import Scaling

Table = Scaling | Sequence[Mapping[str, Any]]
"""Records, one for each trained model."""
Row = Mapping[str, Any]


def chosen(table: Table, names: Sequence[str], where: Mapping[str, Any] | None) -> list[Row]:
    """The records of these settings, of a table that has all of these columns."""
    rows: list[Row] = list(table.table() if isinstance(table, Scaling) else table)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise CurvlensError("The table has no records. Give a Scaling, or a list of mappings, as result.table().")
    for name in [*names, *(where or {})]:
        if not isinstance(name, str):
            raise CurvlensError(f"{name!r} is {a_kind(name)}, expected the name of a column, such as 'samples'.")
        if not any(name in row for row in rows):
            known = dict.fromkeys(str(each) for row in rows for each in row)
            raise CurvlensError(f"The table has no column {name!r}. {nearest(name, known)}")
    return [row for row in rows if all(row.get(name) == value for name, value in (where or {}).items())]


def numeric(rows: Sequence[Row], names: Sequence[str], where: Mapping[str, Any] | None) -> list[Row]:
    """The records that have all of these numbers, which are floats then."""
    kept: list[Row] = []
    for row in rows:
        found = {name: number(row.get(name), name) for name in names}
        if None not in found.values():
            kept.append({**row, **found})
    if not kept:
        raise CurvlensError(f"No row has numbers for {listing(names)} where {dict(where or {})}.")
    return kept


def number(x: Any, name: str) -> float | None:
    """A real number of Python, numpy or torch as a float; None for everything else, truth values, NaN and ∞."""
    x = _plain(x)
    if not isinstance(x, Real) or isinstance(x, bool):
        return None
    try:
        found = float(x)
    except OverflowError:
        raise CurvlensError(
            f"{name!r} has a number beyond float64, which ends at 1.8e308. Measure it in a larger unit."
        ) from None
    return found if math.isfinite(found) else None


def seed_of(row: Row) -> int | float | str | None:
    """The label of a record's seed, 0 if it has none."""
    seed = _plain(row.get("seed", 0))
    if seed is None or isinstance(seed, (int, str)) or (isinstance(seed, float) and math.isfinite(seed)):
        return seed
    raise CurvlensError(f"A row has seed={row['seed']!r}, {a_kind(seed)}. Expected a number or a text, such as 0.")


def differing(rows: Sequence[Row]) -> list[str]:
    """Columns of whole numbers, texts and truth values with several values: settings, not measurements."""
    plain = [name for name in rows[0] if all(whole(x) or isinstance(x, (str, bool)) for x in _column(rows, name))]
    found = [name for name in plain if len(set(_column(rows, name))) > 1 and name != "seed"]
    return found or ["nothing that is a setting"]


def positive(name: str, values: Any, *, size: bool | None = None) -> np.ndarray:
    """Numbers that have a logarithm. ``size`` is None where the caller has no such argument for them."""
    found = np.array(values, dtype=float)
    if size:
        found = np.abs(found)
    wrong = int((found <= 0).sum())
    if wrong:
        least = float(found.min())
        sized = least < 0 and size is False
        fix = "Fit its size: size=True, or choose another quantity." if sized else "Choose another quantity."
        raise CurvlensError(
            f"{name!r} is {'negative' if least < 0 else 'zero'} in {wrong} of {found.size} rows (the least is "
            f"{least:.3g}), where it has no logarithm. {fix}"
        )
    return found


def quantities(given: Any, argument: str) -> list[str]:
    """Names of quantities, given as one or as several, each once."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    strange = [name for name in names if not isinstance(name, str)]
    if strange:
        raise CurvlensError(
            f"{argument}={given!r} has {a_kind(strange[0])}, expected names of quantities, as {argument}='trace' or "
            f"{argument}=['trace', 'frobenius']."
        )
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise CurvlensError(f"{argument} names {listing(twice)} twice. Name each quantity once.")
    return names


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def _plain(x: Any) -> Any:
    """A scalar of numpy or torch as Python's."""
    return x.item() if isinstance(x, (np.generic, np.ndarray, Tensor)) and not x.ndim else x
