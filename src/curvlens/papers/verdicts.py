"""Claims of the papers, and what the measurements say of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds when", "does not hold", "undecided"]
"""Undecided: the repeats are too few to tell. Claims that no experiment measures are open."""


@dataclass(frozen=True)
class Claim:
    """A statement that can be measured."""

    name: str
    statement: str
    source: str
    open: bool = False
    """Whether no experiment measures it yet."""


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


def judged(claim: str, measured: str, *, holds: bool | None, when: str = "") -> Finding:
    """The finding on a claim. ``holds=None`` means undecided; ``when`` says where it holds if not everywhere.

    >>> judged("a", "", holds=False, when="σ ≤ 1").verdict, judged("a", "", holds=True, when="σ ≤ 1").regime
    ('holds when', '')
    """
    if holds:
        return Finding(claim, "holds", measured)
    if when:
        return Finding(claim, "holds when", measured, when)
    return Finding(claim, "undecided" if holds is None else "does not hold", measured)


def all_of(parts: Iterable[bool | None]) -> bool | None:
    """Whether all parts hold; None if undecided.

    >>> all_of([True, True]), all_of([True, None]), all_of([None, False]), all_of([])
    (True, None, False, None)
    """
    known = list(parts)
    return False if False in known else None if None in known or not known else True


def judged_parts(claim: str, measured: str, parts: Mapping[str, bool | None]) -> Finding:
    """The finding on a claim of several named parts.

    It holds if all parts hold, holds when some do, and does not hold if all are refuted. Undecided parts are named.

    >>> judged_parts("a", "", {"the query": True, "the value": False}).regime
    'the query'
    >>> mixed = judged_parts("a", "1 and 2.", {"the query": None, "the value": False})
    >>> mixed.verdict, mixed.measured
    ('undecided', '1 and 2. Undecided: the query. Refuted: the value.')
    """
    true, false, unknown = ([name for name, holds in parts.items() if holds is each] for each in (True, False, None))
    if parts and len(true) == len(parts):
        return judged(claim, measured, holds=True)
    if unknown and len(unknown) < len(parts):
        measured += f" Undecided: {'; '.join(unknown)}."
        measured += f" Refuted: {'; '.join(false)}." if false else ""
    return judged(claim, measured, holds=False if parts and len(false) == len(parts) else None, when="; ".join(true))
