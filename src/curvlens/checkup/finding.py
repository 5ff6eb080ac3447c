"""One thing the doctor found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from curvlens.errors import printable_lines

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
    """How large it is, where that is cheap to measure; `effect` says what it is the size of."""
    unit: str = ""
    """What the number counts, where more of it is better: "digits left". Otherwise 0 is no damage."""

    def __post_init__(self) -> None:
        for name in ("what", "effect", "fix"):  # names of the user's, or of torch's messages, are in them
            object.__setattr__(self, name, printable_lines(getattr(self, name)))

    @property
    def measured(self) -> str:
        """The size as a text, "size 0.012" or "0 digits left"; empty if nothing was measured."""
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
        """Plain texts and numbers; a size that is not finite as None, since JSON has no other."""
        size = self.size if self.size is not None and math.isfinite(self.size) else None
        return {**dataclasses.asdict(self), "size": size}
