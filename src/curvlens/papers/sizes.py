"""Sizes of matrices as they are measured and stored: by name where float64 does not hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens.study import Record

UNDERFLOW = "underflow"
"""In the place of a norm that is not zero but has no float64."""
TINY, LARGE = 1e-150, 1e150
"""Outside, squares of entries or their sums may have left float64 on the way."""


def frobenius(matrix: Tensor) -> float:
    """‖M‖_F; entries are scaled first, so that no square leaves float64."""
    largest = float(matrix.abs().max())
    return largest * float((matrix / largest).norm()) if largest else 0.0


def negative_share(matrix: Tensor) -> float:
    """The share of the squared norm of a symmetric matrix that negative eigenvalues have, beyond rounding."""
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    negative = values[values < -1e-12 * values.abs().max()]
    return float(negative.square().sum() / values.square().sum())


def sized(value: float) -> float | str:
    """A norm that cannot be zero; what float64 cannot hold is named."""
    if math.isfinite(value) and abs(value) < TINY:
        return UNDERFLOW
    return value if abs(value) < LARGE else math.inf


def named_marks(value: Any) -> Any:
    """A result with infinities and NaN by name, as 'underflow' is: marks that a table shows. Other numbers are exact.

    >>> named_marks({"norm": [1 / 3, float("inf"), float("nan")]})
    {'norm': [0.3333333333333333, 'inf', 'nan']}
    """
    if isinstance(value, Mapping):
        return {name: named_marks(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [named_marks(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(stored: Any) -> float:
    """A stored number; NaN where there is only a mark."""
    return math.nan if isinstance(stored, str) else float(stored)


def marked(records: Iterable[Record], over: str = "sigma", name: str = "σ") -> tuple[str, ...]:
    """A note if some numbers left float64, and where on the grid, which is an entry of the configurations."""
    marks: dict[str, set[float]] = {}
    for record in records:
        for text in _texts(record.result):
            marks.setdefault(text, set()).add(record.config[over])
    words = {UNDERFLOW: "too small", "inf": "too large", "nan": "undefined"}
    return tuple(
        f"Some norms are {words.get(mark, mark)} for float64 at {name} from {min(places):.3g} to {max(places):.3g}; "
        "they are marked in the table and left out of curves and fits."
        for mark, places in marks.items()
    )


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
