"""The command line: it parses, calls and prints. Each command imports what it needs, so `--help` is fast."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from curvlens.cli.defaults import SEQUENCES, TOKENS, Sort
from curvlens.errors import CurvlensError

err = Console(stderr=True)
Target = Annotated[
    str,
    typer.Argument(
        help="file.py:name of a Problem, of a tuple (model, data, loss), or of a function that returns one; or a "
        "Hugging Face folder or name, with --text."
    ),
]
Text = Annotated[Path | None, typer.Option(help="A text file to run a Hugging Face model on.")]
Tokens = Annotated[int | None, typer.Option(help=f"Length of a sequence of the text (default: {TOKENS}).", min=2)]
Sequences = Annotated[int | None, typer.Option(help=f"Number of sequences (default: {SEQUENCES}).", min=1)]
app = typer.Typer(help="The exact curvature instrument for Transformers.", no_args_is_help=True, add_completion=False)


def _told(action: Callable[[], None]) -> None:
    """Run a command. Errors that the user can fix are one line, without a traceback. Restores ``sys.path``."""
    path = sys.path[:]
    try:
        action()
    except CurvlensError as error:
        err.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the reader of our output has enough of it
            raise typer.Exit(1) from None
        # of a model's forward pass: nothing was computed, whatever code it gave
        said = f"The code that was given ended the program: sys.exit({error.code!r}). Nothing was computed."
        err.print(said, style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    finally:
        sys.path[:] = path


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"curvlens {version('curvlens')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The exact curvature instrument for Transformers."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of the small GPT.", min=0)] = 600,
    sequences: Annotated[int, typer.Option(help="Additions to compute the curvature on.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Products for each trace and norm of a block.", min=4)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Train a small GPT to add, then print its curvature by layer and role, split into its two parts."""
    from curvlens.cli.demo import run_demo

    run_demo(steps=steps, sequences=sequences, samples=samples, seed=seed)


@app.command()
def blocks(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, name or type (gpt2, llama, …), or file.py:function.")
    ],
    by: Annotated[
        Literal["block", "head", "layer", "role", "parameter"], typer.Option(help="What a row of the table is.")
    ] = "block",
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of attention heads, if the model does not state it.")
    ] = None,
) -> None:
    """Print the named blocks of a model, with the parameters that each consists of."""
    from curvlens.cli.blocks import show_blocks

    _told(lambda: show_blocks(model, by, heads))


@app.command()
def doctor(
    target: Target,
    text: Text = None,
    tokens: Tokens = None,
    sequences: Sequences = None,
) -> None:
    """Look for what would make a curvature wrong, with the line that fixes it. Exit code 1 if there is an error."""
    from curvlens.cli.doctor import show_findings

    healthy = True

    def look() -> None:
        nonlocal healthy
        healthy = show_findings(target, text, tokens=tokens, sequences=sequences)

    _told(look)
    if not healthy:
        raise typer.Exit(1)


@app.command()
def profile(
    target: Target,
    text: Text = None,
    tokens: Tokens = None,
    sequences: Sequences = None,
    double: Annotated[bool, typer.Option("--double", help="Convert a Hugging Face model to float64.")] = False,
    samples: Annotated[int, typer.Option(help="Probes; each costs about five gradients.", min=4)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the probes.")] = 0,
    depth: Annotated[int | None, typer.Option(help="Levels of the tree to show (default: all).", min=0)] = None,
    sort: Annotated[Sort, typer.Option(help="Order of siblings: as in the model, or by size.")] = "order",
    own: Annotated[bool, typer.Option("--own", help="Show each module's own code, without the modules in it.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show rows that are exactly zero.")] = False,
    no_top: Annotated[bool, typer.Option("--no-top", help="Leave out the contributions to λ_max.")] = False,
    spectral: Annotated[
        list[str] | None, typer.Option(help="Also compute the spectral norm of this module; may be repeated.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit, such as 4GiB (default: the free memory).")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the result as JSON, for curvlens.load.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the tree as a chart, one HTML file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all numbers as a table, one line per module.")] = None,
) -> None:
    """Print where the curvature comes from: the Gauss-Newton part, and the functional part of every module."""
    from curvlens.cli.profile import Files, Request, show_profile
    from curvlens.report.terminal.tree import View

    request = Request(target, text, tokens, sequences, double, samples, seed, not no_top, spectral or (), memory)
    view = View(depth, sort, own, everything)
    _told(lambda: show_profile(request, view, Files(out, html, csv)))


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments to measure and draw; 'all'; or 'verdicts' for the page. None lists them."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small settings: minutes instead of hours.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of repeats, instead of each experiment's own.", min=2, max=10_000)
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for results; stored points are not computed again.")] = Path(
        "curvlens-results"
    ),
    jobs: Annotated[
        int | None, typer.Option(help="Processes, with one thread each (default: all cores).", min=1)
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Move unreadable result files away, and continue.")
    ] = False,
) -> None:
    """Measure the papers' figures and claims. A run that was stopped continues where it was."""
    from curvlens.cli.reproduce import Wanted, show_experiments

    wanted = Wanted.of(names or (), quick, seeds, results, jobs, set_aside)
    _told(lambda: show_experiments(wanted))
