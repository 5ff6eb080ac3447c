"""Claims of the papers, and what the measurements say of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds when", "does not hold", "open"]


@dataclass(frozen=True)
class Claim:
    """A statement that can be measured."""

    name: str
    statement: str
    source: str


@dataclass(frozen=True)
class Finding:
    """What the measurements of an experiment say of a claim."""

    claim: str
    """Its name."""
    verdict: Verdict
    measured: str
    """The numbers."""
    regime: str = ""
    """Where it holds, if not everywhere."""
