"""The tree of a profile as a table for the terminal: guides, numbers with their errors, bars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from curvlens.errors import printable
from curvlens.results import COLUMNS, DIGITS, OWN, Estimate, Portion, Profile, Row, aligned

POSITIVE, NEGATIVE = "dodger_blue1", "dark_orange"
BAR = 14
LONGEST = 60
"""Characters of a name that are shown where no terminal bounds the width."""


@dataclass(frozen=True)
class View:
    """What of a profile is shown, and how."""

    depth: int | None = None
    sort: str = "order"
    """As in the model, or the quantity by whose size siblings are sorted."""
    own: bool = False
    everything: bool = False
    """Also rows that are exactly zero."""


@dataclass(frozen=True)
class Line:
    """A line of the tree."""

    guide: str
    name: str
    kind: str
    portion: Portion
    path: str | None = None
    """Of the row that is shown; None where it is none."""


@dataclass
class Lines:
    """The lines that are shown, and how many rows are not."""

    shown: list[Line]
    zero: int = 0
    deeper: int = 0


def lines(profile: Profile, view: View) -> Lines:
    """The Hessian, below it the GGN and the tree of modules."""
    below = profile.tree()
    found = Lines([Line("", "Hessian", "", profile.hessian), Line("├─ ", "GGN", "", profile.ggn)])

    def visit(row: Row, lead: str, last: bool, level: int) -> None:
        portion = row.own if view.own else row.total
        guide, name = lead + ("└─ " if last else "├─ "), printable(row.name) if row.path else "functional"
        found.shown.append(Line(guide, name, printable(row.kind), portion, row.path))
        rows = [r for r in below[row.path] if view.everything or not r.total.is_zero]
        found.zero += sum(_count(r, below) for r in below[row.path]) - sum(_count(r, below) for r in rows)
        if view.depth is not None and level >= view.depth:
            found.deeper += sum(_count(r, below) for r in rows)
            return
        inner: list[Row | None] = list(rows)
        if rows and not view.own and not row.own.is_zero:
            inner.append(None)  # its own code, without which what is in it would not add up to it
        if view.sort != "order":
            shown = {r: (row.own if r is None else r.own if view.own else r.total) for r in inner}
            inner.sort(key=lambda r: _rank(shown[r], view), reverse=True)
        lead += "   " if last else "│  "
        for i, r in enumerate(inner):
            if r is None:
                found.shown.append(Line(lead + ("└─ " if i == len(inner) - 1 else "├─ "), OWN, "", row.own))
            else:
                visit(r, lead, i == len(inner) - 1, level + 1)

    visit(profile[""], "", True, 0)
    return found


def _rank(portion: Portion, view: View) -> float:
    """By size; what is not known comes last."""
    estimate: Estimate | None = getattr(portion, view.sort)
    size = math.nan if estimate is None else abs(float(estimate))
    return -1.0 if math.isnan(size) else size


def _count(row: Row, below: dict[str, list[Row]]) -> int:
    return 1 + sum(_count(r, below) for r in below[row.path])


def fitting(found: Lines, console: Console) -> Table:
    """The table, without its bars or classes where the terminal is too narrow for them."""
    if not console.is_terminal:
        return _table(found.shown, BAR, kinds=True)
    ways = ((BAR, True), (BAR // 2, True), (BAR // 2, False), (0, False))
    tables = [_table(found.shown, bar, kinds=kinds) for bar, kinds in ways]
    return next((t for t in tables if width(t, console) <= console.width), tables[-1])


def width(table: Table, console: Console) -> int:
    """How wide a table wants to be."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(shown: list[Line], bar: int, *, kinds: bool) -> Table:
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    result.add_column("", no_wrap=True, overflow="ellipsis", min_width=12, max_width=LONGEST)
    columns: list[list[Text]] = []
    for name, (heading, factor) in COLUMNS.items():
        cells = [getattr(line.portion, name) for line in shown]
        if all(cell is None for cell in cells):
            continue
        texts = [("", "") if cell is None else cell.short(factor, DIGITS[name]) for cell in cells]
        columns.append(list(_numbers(texts, len(heading))))
        # Not justified to the right by the table, which would strip the blanks by which the signs ± stand in a line.
        result.add_column(heading.rjust(len(columns[-1][0])), no_wrap=True)
        if name == "share" and bar:
            result.add_column("", no_wrap=True)
            columns.append(list(_bars([float(line.portion.share) for line in shown], bar)))
    for i, line in enumerate(shown):
        label = Text().append(line.guide, style="dim").append(line.name, style="bold" if i < 3 else "")
        if kinds and line.kind not in ("", line.name):
            label.append(f"  {line.kind}", style="dim")
        result.add_row(label, *(column[i] for column in columns))
    return result


def _numbers(texts: list[tuple[str, str]], least: int) -> Iterator[Text]:
    """Values below each other, and their errors."""
    for line, (value, _) in zip(aligned(texts, least), texts, strict=True):
        said, sign, error = line.partition(" ± ")
        yield Text(said, style="yellow" if value == "not known" else "").append(sign + error, style="dim")


def _bars(shares: list[float], cells: int) -> Iterator[Text]:
    """From zero to the right what is positive, to the left what is negative; none for the Hessian, which is all."""
    known = [share for share in shares[1:] if not math.isnan(share)]
    low, high = min([0.0, *known]), max([0.0, *known])
    zero = math.ceil(-low * cells / (high - low)) if low < 0 else 0
    unit = min((cells - zero) / high if high else math.inf, -zero / low if low else math.inf)
    yield Text("")
    for share in shares[1:]:
        if math.isnan(share) or not share:
            yield Text("")
        elif share > 0:
            whole, part = divmod(round(8 * share * unit), 8)
            bar = "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[part]
            yield Text(" " * zero).append(bar or "▏", style=POSITIVE)
        else:
            whole, part = divmod(round(-2 * share * unit), 2)
            bar = ("▐" if part else "") + "█" * whole or "▕"
            yield Text(" " * (zero - len(bar))).append(bar, style=NEGATIVE)
