"""What the drawer of a block shows below its numbers: a density, bars, rows. The script of the page draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from curvlens.errors import printable

TENTHS = 10
"""Steps of a decade in which heights are kept: a drawing has 12 pixels for a decade."""
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""A height is one character: how far it is below 1, in steps. The last one is 0.6 of a millionth, and less."""


class Shared:
    """Values that many parts have, each once: a part holds their numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def keep(self, value: Any) -> int:
        """The number of a value."""
        said = json.dumps(value)
        if said not in self._places:
            self._places[said] = len(self.values)
            self.values.append(value)
        return self._places[said]


class Part(Protocol):
    """A part of a drawer."""

    def data(self, shared: Shared) -> dict[str, Any]:
        """Numbers and texts for the script. Texts are made printable here."""
        ...


@dataclass(frozen=True)
class Bars:
    """Names with a bar and a text each; ``left`` are not shown. ``line`` is the Python that gives them."""

    title: str
    bars: Sequence[tuple[str, str, float]]
    line: str = ""
    left: int = 0

    def data(self, shared: Shared) -> dict[str, Any]:
        """Lengths as thousandths of the longest."""
        longest = max((abs(value) for _, _, value in self.bars), default=0.0) or 1.0
        bars = [[printable(who), said, round(1000 * value / longest)] for who, said, value in self.bars]
        about = shared.keep({"kind": "bars", "title": self.title, "line": self.line})
        return {"about": about, "bars": bars, "left": self.left}


@dataclass(frozen=True)
class Rows:
    """A small table. The first cell of a row names it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    line: str = ""

    def data(self, shared: Shared) -> dict[str, Any]:
        """Its texts."""
        rows = [shared.keep([printable(cell) for cell in row]) for row in self.rows]
        about = shared.keep({"kind": "rows", "title": self.title, "columns": list(self.columns)})
        return {"about": about, "line": printable(self.line), "rows": rows}


@dataclass(frozen=True)
class Shares:
    """A density in bins of a logarithmic axis mirrored at 0: ``x``, ``share``, ``low``, ``high``; ``n`` eigenvalues."""

    title: str
    picture: Mapping[str, Any]
    note: str = ""
    line: str = ""

    def data(self, shared: Shared) -> dict[str, Any]:
        """Heights as logarithms, in tenths of a decade; a bin with less than one eigenvalue is a space."""
        picture = self.picture
        least = max(0.3 / max(picture["n"], 1), 10 ** (-(len(DIGITS) - 1) / TENTHS))
        x = picture["x"]
        return {
            "about": shared.keep({"kind": "shares", "title": self.title, "line": self.line}), "note": self.note,
            "least": _steps(least), "zero": _zero(x), "ends": [float(f"{each:.3g}") for each in (x[0], x[-1])],
            "share": "".join(DIGITS[_steps(each)] if each >= least else " " for each in picture["share"]),
            "low": "".join(DIGITS[_steps(max(each, least))] for each in picture["low"]),
            "high": "".join(DIGITS[_steps(max(each, least))] for each in picture["high"]),
        }  # fmt: skip


def _steps(share: float) -> int:
    """How far a share is below 1."""
    return max(0, round(-TENTHS * math.log10(share)))


def _zero(x: Sequence[float]) -> float:
    """Where 0 is, as a share of the width: bins are even on the axis."""
    return round(sum(each < 0 for each in x) / max(len(x) - 1, 1), 4)
