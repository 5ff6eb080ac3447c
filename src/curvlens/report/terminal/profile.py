"""What stands below the tree of a profile: how to read it, what is not shown, and whether it adds up."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from curvlens.errors import printable
from curvlens.report.terminal.tree import Lines, View
from curvlens.results import DIGITS, Profile


def footer(found: Profile, rows: Lines, view: View) -> Iterator[Text]:
    """Lines of text."""
    if view.own:
        yield Text("A row is a module's own code, without the modules in it; the GGN and all rows add up to H.")
    else:
        yield Text("A row is a module with all that is in it. Traces, shares and parts of λ_max add up, norms do not.")
    tops = [line.portion.top for line in rows.shown]
    bounds = any(top is not None and top.short(1.0, DIGITS["top"])[1] for top in tops)
    yield Text(
        "Shares are ⟨M, H⟩/‖H‖² and may be negative. Behind ± are standard errors"
        + (", for λ_max bounds." if bounds else "."),
        style="dim",
    )
    shown = {line.path for line in rows.shown} if not view.own else set()
    for row in found:
        if row.total.spectral is not None and row.path not in shown:
            size = " ± ".join(filter(None, row.total.spectral.short(1.0, DIGITS["spectral"])))
            yield Text(f"‖M‖₂ of {printable(row.path) or 'the functional part'}, with all that is in it: {size}")
    if rows.deeper:
        yield Text(f"{_rows(rows.deeper)} below depth {view.depth} not shown (--depth).", style="dim")
    if rows.zero:
        yield Text(f"{_rows(rows.zero)} that {'is' if rows.zero == 1 else 'are'} zero not shown (--all).", style="dim")
    mark, colour = ("✓", "green") if found.adds_up else ("✗", "red")
    yield Text(f"{mark} {found.check}", style=colour)
    if found.note:
        yield Text(f"note: {printable(found.note)}", style="yellow")


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"
