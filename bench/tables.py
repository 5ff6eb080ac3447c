"""A table, once for the terminal and once for Markdown; and a target. Both also for what could not be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

Results = Mapping[str, Any]
"""What was measured, as in ``results.json``; ``{"not_run": why}`` stands for what was not."""


@dataclass(frozen=True)
class Table:
    """Title, head, rows of text, and what a reader has to know of it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def show(self, console: Console) -> None:
        """Print it."""
        table = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.head):
            table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(escape(cell.replace("**", "")) for cell in row))
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()

    def markdown(self) -> str:
        """The same as Markdown."""
        rule = ["---", *["--:"] * (len(self.head) - 1)]
        lines = [self.head, rule, *([cell.replace("|", "\\|") for cell in row] for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", body, *self.notes])


class Target(NamedTuple):
    """What is to be reached: at most the limit if `below`, otherwise at least."""

    name: str
    value: float | None
    limit: float
    below: bool = False

    def row(self) -> list[str]:
        """Name, measured value, limit, result."""
        wanted = f"{'≤' if self.below else '≥'} {self.limit:g}"
        if self.value is None:
            return [self.name, "not run", wanted, "fail"]
        reached = self.value <= self.limit if self.below else self.value >= self.limit
        return [self.name, f"{self.value:.2f}", wanted, "pass" if reached else "fail"]


def value(row: Results, *keys: str) -> float | None:
    """A number deep in a row, if it was measured."""
    found: Any = row
    for key in keys:
        if "not_run" in found:
            return None
        found = found[key]
    return float(found)


def absent(row: Results, width: int) -> list[str]:
    """As many cells for a row that was not measured."""
    return [f"not run: {row['not_run']}", *[""] * (width - 1)]


def absent_table(title: str, row: Results, head: Sequence[str] = ("", "")) -> Table:
    """A table of which nothing was measured."""
    return Table(title, head, [["not run", str(row["not_run"]), *[""] * (len(head) - 2)]])


def threads(count: str) -> str:
    """As a reader says it."""
    return f"{count} thread{'' if count == '1' else 's'}"
