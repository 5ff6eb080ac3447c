"""``curvlens landscape``: how the loss settles as samples are added, at the model and around it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from curvlens import files as disk
from curvlens.cli.code import is_code
from curvlens.cli.defaults import Options
from curvlens.cli.door import pose
from curvlens.cli.profile import FIX, Files
from curvlens.cli.said import say
from curvlens.dynamics import data_size, landscape
from curvlens.dynamics.advice import short
from curvlens.errors import CurvlensError, printable
from curvlens.problem import Problem
from curvlens.report.commas import commas
from curvlens.report.terminal.tables import table
from curvlens.results import DataSize, Landscape

SEQUENCES = 64
"""Sequences of a Hugging Face model's data, if nothing is said: an order needs several."""


@dataclass(frozen=True)
class Request:
    """What to compute, and for which target."""

    options: Options
    radii: Sequence[float]
    within: str | None
    tolerance: float | None
    losses_only: bool
    orders: int
    points: int
    probes: int


def show_landscape(request: Request, files: Files) -> None:
    """Measure a landscape, print it, and write what is asked for."""
    files.check()
    if request.losses_only and request.radii:
        raise CurvlensError(
            "--radius needs gradients and Hessians, which --losses-only leaves out. Give one of the two."
        )
    options = request.options
    if options.sequences is None and not is_code(options.target):
        options = dataclasses.replace(options, sequences=SEQUENCES)
    posed = pose(options)
    say(posed)
    problem = posed.problem()
    found = _computed(problem, request)
    sizes = data_size(problem, request.tolerance, seed=options.seed) if request.tolerance is not None else None
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a pipe folds no numbers
    _show(found, sizes, request.within, console)
    for file in _written(found, files):
        console.print(f"written: {printable(str(file))}", highlight=False, markup=False, soft_wrap=True)


def _computed(problem: Problem, request: Request) -> Landscape:
    """The landscape, with a bar on the terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("samples"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("samples", total=None)
        return landscape(
            problem,
            request.radii,
            within=request.within,
            curvature=not request.losses_only,
            orders=request.orders,
            points=request.points,
            probes=request.probes,
            seed=request.options.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _show(found: Landscape, sizes: DataSize | None, within: str | None, console: Console) -> None:
    where = f", within {within}" if within else ""
    console.print(
        Text(printable(f"Landscape of {found.samples} samples over {found.orders} orders{where}"), style="bold")
    )
    names = list(found.table()[0])
    titles = [name.replace("_", " ") for name in names]
    rows = [[short(row[name], 4) if name != "samples" else str(row[name]) for name in names] for row in found.table()]
    console.print(table(titles, rows, numbers=titles))
    for line in _sentences(found, sizes):
        console.print(Text(line), soft_wrap=True)


def _sentences(found: Landscape, sizes: DataSize | None) -> Iterator[str]:
    """What the numbers say."""
    if found.slopes:
        told = ", ".join(f"{name} {slope}" for name, slope in found.slopes.items())
        yield f"Slopes against k on a log scale: {told}. Independent samples have −1 (increment) and −½ (distances)."
    yield f"The gradient norm at the model is {short(found.gradient_norm)}: " + (
        "the moments below do not assume a minimum." if len(found.radii) else "it is 0 at a minimum."
    )
    for i, radius in enumerate(found.radii.tolist()):
        next_one = int(found.k[-1]) + 1
        model, true, error = (
            float(x[i, -1]) / next_one**2 for x in (found.second, found.true_second, found.true_error)
        )
        yield (
            f"At a distance of {short(radius)} from the model, sample {next_one} changes the loss by "
            f"{short(math.sqrt(max(model, 0.0)))} by the quadratic model, and by {short(math.sqrt(max(true, 0.0)))} ± "
            f"{short(error / (2 * math.sqrt(true)) if true > 0 else 0.0, 2)} in truth (root mean square)."
        )
    if found.holds is not None:
        yield f"The quadratic model holds up to a distance of {short(found.holds)} of those given."
    elif len(found.radii):
        yield "The quadratic model is not seen to hold at any of the distances. Give smaller ones with --radius."
    if found.note:
        yield f"Note: {printable(found.note)}."
    if sizes is not None:
        yield (
            f"For a tolerance of {sizes.tolerance:g}: from {sizes.increment:,} samples on one more changes the loss by "
            f"less, and from {sizes.distance:,} samples on the loss is as close to its limit (root mean square)."
        )


def _written(found: Landscape, files: Files) -> Iterator[Path]:
    if files.out is not None:
        yield found.save(files.out)
    if files.html is not None:
        with _explained(files.html):
            found.plot(files.html, what="all")
        yield files.html
    if files.csv is not None:
        with _explained(files.csv):
            disk.write(files.csv, commas(_records(found)), seal=".csv", fix=FIX)
        yield files.csv


def _records(found: Landscape) -> list[dict[str, Any]]:
    """What settles with the samples, then the surroundings; of equal fields."""
    rows = [*found.table(), *found.around_table()]
    fields = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in fields} for row in rows]


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} could not be written: {error.strerror}.") from error
