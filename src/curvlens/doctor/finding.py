"""One thing the doctor found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]

RANK: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
"""How severe a severity is; the worst is 0."""


@dataclass(frozen=True)
class Finding:
    """What was found, what it does to a result, how large that is, and the line that undoes it."""

    name: str
    """A short name that stays the same from version to version, e.g. "dropout-active"."""
    severity: Severity
    """An error makes results wrong or impossible, a warning costs digits or meaning, a note is good to know."""
    what: str
    """What was found, with the names of modules, parameters or batches."""
    effect: str
    """What it would do to a result."""
    fix: str
    """The line that undoes it."""
    size: float | None = None
    """How large it is, where that is cheap to measure; `what` or `effect` says in which unit."""

    def __str__(self) -> str:
        size = "" if self.size is None else f" (size {self.size:.2g})"
        return f"{self.name}{size}: {self.what} {self.effect} Fix: {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain texts and numbers; a size that is not finite as None, since JSON has no other."""
        size = self.size if self.size is not None and math.isfinite(self.size) else None
        return {**dataclasses.asdict(self), "size": size}
