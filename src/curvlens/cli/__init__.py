"""The command line: it parses, calls and prints. Each command imports what it needs, so `--help` is fast."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from curvlens.cli.defaults import SEQUENCES, TOKENS, FileDtype, LossName, Options, Precision, Sort
from curvlens.errors import CurvlensError, CurvlensWarning, printable

err = Console(stderr=True)
Flag = partial(typer.Option, metavar="")  # the help of a flag shows no <bool>, which nobody types
Target = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder or name, with --data; file.py:name of a Problem, of a tuple (model, data, loss), "
        "or of a function that returns one of these; or demo."
    ),
]
DataFile = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="A text file; .jsonl with text, with input and target, or with text and label; tokens as .npy or .bin; or "
        "builtin.",
    ),
]
DataDtype = Annotated[FileDtype | None, typer.Option(help="What a .bin file of tokens holds (default: uint16).")]
LossOption = Annotated[
    LossName | None, typer.Option("--loss", help="The loss (default: that of the model's architecture).")
]
Device = Annotated[str | None, typer.Option(help="The device to compute on, such as cuda (default: cpu).")]
Dtype = Annotated[Precision | None, typer.Option(help="Convert the model to this precision (default: as stored).")]
Tokens = Annotated[int | None, typer.Option(help=f"At most this many tokens a sequence (default: {TOKENS}).", min=2)]
Sequences = Annotated[int | None, typer.Option(help=f"At most this many sequences (default: {SEQUENCES}).", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of everything random: masks, probes, the model of demo.")]
Trust = Annotated[bool, Flag("--trust-remote-code", help="Run the custom code of a model's folder. Read it first.")]
app = typer.Typer(help="The exact curvature instrument for Transformers.", no_args_is_help=True, add_completion=False)


def _told(action: Callable[[], None]) -> None:
    """Run a command. Errors that the user can fix are one line, without a traceback. Restores ``sys.path``."""
    path = sys.path[:]
    try:
        with _plain_warnings():
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


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our warnings without the file and line that raised them, which are not the user's."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, CurvlensWarning):
                err.print(Text(f"warning: {printable(str(message))}", style="yellow"), soft_wrap=True)
            else:
                before(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"curvlens {version('curvlens')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, Flag("--version", callback=_tell_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """The exact curvature instrument for Transformers."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the page, index.html, and of all numbers.")] = Path(
        "curvlens-demo"
    ),
    budget: Annotated[str, typer.Option(help="A time such as 1m, or a cost such as '500 gradients'.")] = "45s",
    seed: Seed = 0,
) -> None:
    """Train a small GPT to add, analyse it within a minute, and write the page."""
    from curvlens.cli.analyze import Wanted, show_analysis

    _told(lambda: _interruptible(show_analysis(Wanted(Options("demo", seed=seed), out, budget))))


@app.command()
def analyze(
    target: Target,
    data: DataFile = None,
    budget: Annotated[str, typer.Option(help="A time such as 10m, or a cost such as '500 gradients'.")] = "10m",
    out: Annotated[
        Path,
        typer.Option(help="Folder of the page, index.html, and of all numbers. Give it again to continue or refine."),
    ] = Path("run"),
    optimizer: Annotated[
        Path | None,
        typer.Option(
            help="State of your optimiser, from torch.save: also measure how far it is from its edge of stability."
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit for kept graphs, such as 4GiB.")] = None,
    dry_run: Annotated[bool, Flag("--dry-run", help="Print the plan and stop.")] = False,
    minimal: Annotated[bool, Flag("--minimal", help="Only summary, heat map and spectrum.")] = False,
    private: Annotated[bool, Flag("--private", help="No text of the data on the page.")] = False,
    data_dtype: DataDtype = None,
    loss: LossOption = None,
    device: Device = None,
    dtype: Dtype = None,
    tokens: Tokens = None,
    sequences: Sequences = None,
    seed: Seed = 0,
    trust_remote_code: Trust = False,
) -> None:
    """Measure the curvature of a model within a budget, and write one page: where it is, how large, what it means."""
    from curvlens.cli.analyze import Wanted, show_analysis

    options = Options(target, data, data_dtype, loss, device, dtype, tokens, sequences, seed, trust_remote_code)
    wanted = Wanted(options, out, budget, memory, optimizer, minimal, private, dry_run)
    _told(lambda: _interruptible(show_analysis(wanted)))


def _interruptible(finished: bool) -> None:
    """Exit code 130 after Ctrl-C, as shells expect it."""
    if not finished:
        raise typer.Exit(130)


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
    data: DataFile = None,
    data_dtype: DataDtype = None,
    loss: LossOption = None,
    device: Device = None,
    dtype: Dtype = None,
    tokens: Tokens = None,
    sequences: Sequences = None,
    seed: Seed = 0,
    trust_remote_code: Trust = False,
) -> None:
    """Look for what would make a curvature wrong, with the line that fixes it. Exit code 1 if there is an error."""
    from curvlens.cli.doctor import show_findings

    options = Options(target, data, data_dtype, loss, device, dtype, tokens, sequences, seed, trust_remote_code)
    healthy = True

    def look() -> None:
        nonlocal healthy
        healthy = show_findings(options)

    _told(look)
    if not healthy:
        raise typer.Exit(1)


@app.command()
def profile(
    target: Target,
    data: DataFile = None,
    data_dtype: DataDtype = None,
    loss: LossOption = None,
    device: Device = None,
    dtype: Dtype = None,
    tokens: Tokens = None,
    sequences: Sequences = None,
    seed: Seed = 0,
    trust_remote_code: Trust = False,
    samples: Annotated[int, typer.Option(help="Probes; each costs about five gradients.", min=4)] = 16,
    depth: Annotated[int | None, typer.Option(help="Levels of the tree to show (default: all).", min=0)] = None,
    sort: Annotated[Sort, typer.Option(help="Order of siblings: as in the model, or by size.")] = "order",
    own: Annotated[bool, Flag("--own", help="Show each module's own code, without the modules in it.")] = False,
    everything: Annotated[bool, Flag("--all", help="Also show rows that are exactly zero.")] = False,
    no_top: Annotated[bool, Flag("--no-top", help="Leave out the contributions to λ_max.")] = False,
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

    options = Options(target, data, data_dtype, loss, device, dtype, tokens, sequences, seed, trust_remote_code)
    request = Request(options, samples, not no_top, spectral or (), memory)
    view = View(depth, sort, own, everything)
    _told(lambda: show_profile(request, view, Files(out, html, csv)))


@app.command()
def landscape(
    target: Target,
    data: DataFile = None,
    radius: Annotated[
        list[float] | None, typer.Option(help="Also measure at this distance around the model; may be repeated.")
    ] = None,
    within: Annotated[str | None, typer.Option(help="Only move this block, such as h.0.attn.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Also print how many samples the loss needs for this tolerance.")
    ] = None,
    losses_only: Annotated[bool, Flag("--losses-only", help="Leave out gradients and Hessians: much faster.")] = False,
    data_dtype: DataDtype = None,
    loss: LossOption = None,
    device: Device = None,
    dtype: Dtype = None,
    tokens: Tokens = None,
    sequences: Annotated[int | None, typer.Option(help="At most this many sequences (default: 64).", min=16)] = None,
    seed: Seed = 0,
    trust_remote_code: Trust = False,
    orders: Annotated[int, typer.Option(help="Random orders of the samples.", min=20)] = 200,
    points: Annotated[int, typer.Option(help="Random points around the model for each distance.", min=2)] = 16,
    probes: Annotated[int, typer.Option(help="Random probes for Hessians.", min=2)] = 4,
    out: Annotated[Path | None, typer.Option(help="Save the result as JSON, for curvlens.load.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the chart, one HTML file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table, one line for each number of samples.")] = None,
) -> None:
    """Print how loss, gradient and Hessian settle as samples are added, at the model and around it."""
    from curvlens.cli.landscape import Request, show_landscape
    from curvlens.cli.profile import Files

    options = Options(target, data, data_dtype, loss, device, dtype, tokens, sequences, seed, trust_remote_code)
    request = Request(options, radius or (), within, tolerance, losses_only, orders, points, probes)
    _told(lambda: show_landscape(request, Files(out, html, csv)))


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more folders of curvlens analyze, in order.")],
    out: Annotated[Path, typer.Option(help="The page; .json and .csv are written beside it.")] = Path("compare.html"),
    names: Annotated[
        str | None,
        typer.Option(help="Names of the analyses, such as before,after (default: the names of the folders)."),
    ] = None,
) -> None:
    """Print what changed between analyses, with errors, and write it as a page."""
    from curvlens.cli.compare import show_comparison

    _told(lambda: show_comparison(folders, out, names))


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments to measure and draw; 'all'; or 'verdicts' for the page. None lists them."),
    ] = None,
    quick: Annotated[bool, Flag("--quick", help="Small settings: minutes instead of hours.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of repeats, instead of each experiment's own.", min=2, max=10_000)
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for results; stored points are not computed again.")] = Path(
        "curvlens-results"
    ),
    jobs: Annotated[
        int | None, typer.Option(help="Processes, with one thread each (default: all cores).", min=1)
    ] = None,
    set_aside: Annotated[bool, Flag("--set-aside", help="Move unreadable result files away, and continue.")] = False,
) -> None:
    """Measure the papers' figures and claims. A run that was stopped continues where it was."""
    from curvlens.cli.reproduce import Wanted, show_experiments

    wanted = Wanted.of(names or (), quick, seeds, results, jobs, set_aside)
    _told(lambda: show_experiments(wanted))
