"""The command line: it parses, calls and prints."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from curvlens.cli.blocks import show_blocks
from curvlens.cli.demo import run_demo
from curvlens.cli.doctor import show_findings
from curvlens.errors import CurvlensError

err = Console(stderr=True)
app = typer.Typer(help="The exact curvature instrument for Transformers.", no_args_is_help=True, add_completion=False)


def _told(action: Callable[[], None]) -> None:
    """Run a command; what the user has to mend is a line, not a traceback."""
    try:
        action()
    except CurvlensError as error:
        err.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


@app.callback()
def main() -> None:
    """The exact curvature instrument for Transformers."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of the little GPT.", min=0)] = 600,
    sequences: Annotated[int, typer.Option(help="Sums over which the curvature is taken.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Products spent on each trace and norm of a block.", min=4)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Train a small GPT to add, then print its curvature by layer and role, split into its two parts."""
    run_demo(steps=steps, sequences=sequences, samples=samples, seed=seed)


@app.command()
def blocks(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, name or type (gpt2, llama, …), or file.py:function.")
    ],
    by: Annotated[
        Literal["block", "head", "layer", "role", "parameter"], typer.Option(help="What a row of the table is.")
    ] = "block",
) -> None:
    """Print the named blocks of a model: by which name which part of which parameter is asked for."""
    _told(lambda: show_blocks(model, by))


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            help="file.py:name of a Problem, of a tuple (model, data, loss), or of a function that returns one; or a "
            "Hugging Face folder or name, with --text."
        ),
    ],
    text: Annotated[Path | None, typer.Option(help="The text on which a Hugging Face model is looked at.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of a sequence.", min=2)] = 64,
    sequences: Annotated[int, typer.Option(help="How many of them.", min=1)] = 4,
) -> None:
    """Look for what would make a curvature wrong, with the line that fixes it. Exit code 1 if there is an error."""
    healthy = True

    def look() -> None:
        nonlocal healthy
        healthy = show_findings(target, text, tokens=tokens, sequences=sequences)

    _told(look)
    if not healthy:
        raise typer.Exit(1)
