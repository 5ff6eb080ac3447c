"""One entry of the doctor's report."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from curvlens.errors import printable_lines

Severity = Literal["error", "warning", "note"]

RANK: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
"""Sort key of the severities; the worst is 0."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, its effect on results, its size, and the line of code that fixes it."""

    name: str
    """A short name that stays the same from version to version, e.g. "dropout-active"."""
    severity: Severity
    """An error makes results wrong or impossible, a warning costs digits or meaning, a note is for information."""
    what: str
    """What was found, with the names of modules, parameters or batches."""
    effect: str
    """Its effect on a result."""
    fix: str
    """The line of code that fixes it."""
    size: float | None = None
    """A measured size, where that is cheap; `effect` says what it measures."""
    unit: str = ""
    """The unit of the size, if a larger number is better ("digits left"). Without a unit, 0 means no damage."""

    def __post_init__(self) -> None:
        for name in ("what", "effect", "fix"):  # they contain names from the user's model or from torch's messages
            object.__setattr__(self, name, printable_lines(getattr(self, name)))

    @property
    def measured(self) -> str:
        """The size as text, "size 0.012" or "0 digits left". Empty if nothing was measured."""
        if self.size is None:
            return ""
        return f"{self.size:.2g} {self.unit}" if self.unit else f"size {self.size:.2g}"

    @property
    def headed(self) -> str:
        """The name with the size."""
        return f"{self.name} ({self.measured})" if self.measured else self.name

    def __str__(self) -> str:
        return f"{self.headed}: {self.what} {self.effect} Fix: {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain texts and numbers. A size that is not finite becomes None, since JSON has no infinity."""
        size = self.size if self.size is not None and math.isfinite(self.size) else None
        return {**dataclasses.asdict(self), "size": size}
