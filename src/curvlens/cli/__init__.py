"""The command line: it parses, calls and prints."""

from typing import Annotated

import typer

from curvlens.cli.demo import run_demo

app = typer.Typer(help="The exact curvature instrument for Transformers.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """The exact curvature instrument for Transformers."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of the little GPT.", min=0)] = 600,
    sequences: Annotated[int, typer.Option(help="Sums over which the curvature is taken.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Train a small GPT to add, then print the curvature of every parameter, split into its two parts."""
    run_demo(steps=steps, sequences=sequences, seed=seed)
