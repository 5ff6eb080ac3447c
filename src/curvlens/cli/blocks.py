"""``curvlens blocks``: the map of a model, as a table."""

from __future__ import annotations

import warnings

from rich.console import Console, RenderableType
from rich.text import Text

from curvlens.blocks import Block, Blocks, By, map_blocks
from curvlens.cli.models import skeleton
from curvlens.errors import CurvlensError, CurvlensWarning, printable
from curvlens.problem import Problem
from curvlens.report.terminal import tables


def show_blocks(target: str, by: By, heads: int | None = None) -> None:
    """Print the blocks of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvlensWarning)  # an unknown architecture is told below the table
        made = skeleton(target)
        if isinstance(made, Problem):
            if heads is not None:
                raise CurvlensError(
                    f"--heads {heads} was given, but {target} returns a Problem, which has its own blocks. Leave "
                    f"--heads out, and give it to the Problem: Problem(..., heads={heads})."
                )
            blocks = made.blocks.by(by)
        else:
            blocks = map_blocks(made, heads=heads).by(by)
    console = Console()
    console.print(table(blocks))
    console.print(printable(_summary(blocks)), highlight=False, markup=False)


def table(blocks: Blocks) -> RenderableType:
    """A table with one row per block."""
    return tables.table(
        ("block", "numbers", "heads", "is"),
        (_row(block) for block in blocks.values()),
        title=f"Blocks, family {blocks.family or 'unknown'}",
        numbers=("numbers", "heads"),
        options={"block": {"no_wrap": True}, "is": {"overflow": "fold"}},
        title_justify="left",
    )


def _row(block: Block) -> tuple[str | Text, ...]:
    name = printable(" = ".join((block.name, *block.aliases)))
    return Text(name), f"{block.size:,}", str(block.n_heads or ""), Text(_parts(block))


def _parts(block: Block, most: int = 4) -> str:
    keys = [printable(part.key) for part in block.parts]
    return "\n".join(keys[:most]) + (f"\nand {len(keys) - most} more" if len(keys) > most else "")


def _summary(blocks: Blocks) -> str:
    text = f"{len(blocks)} blocks, {blocks.size:,} numbers."
    if blocks.family is None:
        text = f"{text} The architecture is not known"
        one_each = len(blocks) == len(blocks.order)
        return (
            f"{text}: one block per parameter. Name them: Problem(..., {blocks.suggestion})."
            if one_each
            else f"{text}."
        )
    if blocks.unmapped:
        return f"{text} Not named by the family: {', '.join(blocks.unmapped)}."
    return text
