"""Tables and lists of plain texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str | None = None,
    numbers: Sequence[str] = (),
    options: dict[str, dict[str, Any]] | None = None,
    **style: Any,
) -> Table:
    """One row a line; columns of ``numbers`` are at the right. ``options`` are those of single columns."""
    result = Table(title=title, **style)
    for name in titles:
        more = (options or {}).get(name, {})
        result.add_column(name, justify="right" if name in numbers else "left", **more)
    for row in rows:
        result.add_row(*row)
    return result


def findings(found: Iterable[tuple[str, str, Sequence[str]]]) -> Iterator[Text]:
    """Lines for findings of a severity: the headed one, and its explanations below it."""
    for severity, headed, lines in found:
        yield Text().append(f"{severity:<8}", style=COLOURS[severity]).append(headed)
        for line in lines:
            yield Text(f"        {line}")
