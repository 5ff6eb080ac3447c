"""``curvlens compare``: print what changed between analyses, and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from curvlens.analysis.compare import Comparison, compare
from curvlens.analysis.differences import said, signed
from curvlens.dynamics.advice import short
from curvlens.errors import printable
from curvlens.report.terminal.tables import table

MOST = 4
"""Columns of values. With more analyses only the first and the last are printed; the page has all."""


def show_comparison(folders: Sequence[Path], out: Path, names: str | None) -> None:
    """Print headline numbers and sentences; write ``out`` and the files beside it."""
    found = compare(folders, out, None if names is None else names.split(","))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a pipe folds no names
    _show(found, console)


def _show(found: Comparison, console: Console) -> None:
    names, last = found.names, found.content["differences"][-1]["whole"]
    places = list(range(len(names))) if len(names) <= MOST else [0, len(names) - 1]
    heads = [printable(names[place]) for place in places]
    rows = []
    for key, about in found.content["numbers"].items():
        whys = about.get("why") or [""] * len(about["values"])
        values = [
            said(value) if (value := about["values"][place]) is not None else "not known" if whys[place] else ""
            for place in places
        ]
        change, style = last.get(key), "dim"
        if change is None:
            shown = ["", "", "not in both"]
        else:
            ratio = "" if change["ratio"] is None else short(change["ratio"])
            verdict = {True: "changed", False: "not clear", None: "error not known"}[change["clear"]]
            shown, style = [signed(change), ratio, verdict], "" if change["clear"] else "dim"
        rows.append([Text(about["title"]), *map(Text, values), *(Text(each, style=style) for each in shown)])
    titles = ["quantity", *heads, "difference", "ratio", "verdict"]
    console.print(table(titles, rows, numbers=[*heads, "difference", "ratio"]))
    for note in found.content["notes"]:
        console.print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)
    for number, each in enumerate(found.content["sentences"], start=1):
        console.print(Text(f"{number}. {printable(each['text'])}"), soft_wrap=True)
    if found.page is not None:
        files = ", ".join(str(found.page.with_suffix(kind)) for kind in (".html", ".json", ".csv"))
        console.print(Text(f"Written: {printable(files)}", style="dim"), soft_wrap=True)
