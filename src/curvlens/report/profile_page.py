"""The page of a profile: the icicle, and all its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from curvlens.errors import printable
from curvlens.report.content import Column, Content, Mark, Number, Prose, Table, Words
from curvlens.report.icicle import QUANTITIES, Icicle, factor_of, short
from curvlens.report.page import Page, Section
from curvlens.results import DIGITS, Portion, Profile


def icicle(profile: Profile, quantity: str = "share") -> str:
    """A page with the modules of a profile as an icicle, and all numbers as a table.

    Args:
        profile: what `curvlens.profile` returned, or what was loaded.
        quantity: what the page shows at first: ``share``, ``trace``, ``top`` or ``frobenius``.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> icicle(cl.profile(problem, samples=4)).startswith("<!doctype html>")
    True
    """
    chart = Icicle(profile, quantity)
    return Page(
        "Where the curvature comes from",
        [
            Section("modules", "By module", body=[chart]),
            Section("numbers", "All numbers", body=[_table(profile)], folded=True),
        ],
        lead=_lead(profile),
        banner=f"note: {printable(profile.note)}" if profile.note else "",
        provenance=profile.provenance,
        filtered="modules",
    ).html()


def _lead(profile: Profile) -> Sequence[Content]:
    """What was profiled, the split of the trace, and whether all rows add up."""
    check = Mark(f"✓ {profile.check}", "good") if profile.adds_up else Mark(f"✗ {profile.check}", "bad")
    traces = [" ± ".join(filter(None, short(p.trace))) for p in (profile.hessian, profile.ggn, profile[""].total)]
    known = math.isfinite(profile.mismatch)
    split = f"traces {traces[0]} = {traces[1]} + ({traces[2]})" if known else "traces not known"
    words: Words = (f"H = GGN + functional part; {split}. ", check)
    return [Prose(f"{printable(profile.headline)}."), Prose(words)]


def _table(profile: Profile) -> Table:
    named = [name for name in QUANTITIES if any(_held(portion, name) for portion in _portions(profile))]
    columns = [Column("module"), Column("class")]
    columns += [
        Column(which, numbers=True, group=f"{QUANTITIES[name][0]}{_in_unit(name)}")
        for name in named
        for which in ("total", "own")
    ]
    rows = [_row("Hessian", "", profile.hessian, None, named), _row("GGN", "", profile.ggn, None, named)]
    rows += [_row(row.path or "functional", row.kind, row.total, row.own, named) for row in profile]
    return Table(columns, rows, "all numbers")


def _in_unit(name: str) -> str:
    unit = QUANTITIES[name][1].strip()
    return f", {unit}" if unit else ""


def _portions(profile: Profile) -> Iterable[Portion]:
    yield profile.hessian
    for row in profile:
        yield row.total


def _held(portion: Portion, name: str) -> bool:
    return getattr(portion, name) is not None


def _row(path: str, kind: str, total: Portion, own: Portion | None, named: Iterable[str]) -> list[Words]:
    cells = (_cell(portion, name) for name in named for portion in (total, own))
    return [printable(path), printable(kind), *cells]


def _cell(portion: Portion | None, name: str) -> Words:
    estimate = getattr(portion, name, None)
    if estimate is None:
        return ""
    value, error = short(estimate, factor_of(name), DIGITS[name])
    return Number(value, error, factor_of(name) * float(estimate))
