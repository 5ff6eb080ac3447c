"""A table, once for the terminal and once for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


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
