"""``curvlens profile``: where the curvature of a model comes from, as a tree, a JSON file and a chart."""

from __future__ import annotations

import errno
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from curvlens import files as disk
from curvlens.cli.defaults import Options
from curvlens.cli.door import pose
from curvlens.cli.said import say
from curvlens.errors import CurvlensError, CurvlensWarning, NotedWarning, printable
from curvlens.problem import Problem
from curvlens.profiling import Forecast, profile
from curvlens.report import icicle
from curvlens.report.commas import commas
from curvlens.report.terminal.profile import footer
from curvlens.report.terminal.tree import View, fitting, lines, width
from curvlens.results import Profile, claim
from curvlens.study.budget import readable_time

EVERY = 10.0
"""Seconds between two lines of progress."""
FIX = "Move it away, or choose another name."


@dataclass(frozen=True)
class Request:
    """What to compute, and for which target."""

    options: Options
    samples: int
    top: bool
    spectral: Sequence[str]
    memory: str | None = None


@dataclass(frozen=True)
class Files:
    """The files to write the result to."""

    out: Path | None = None
    html: Path | None = None
    csv: Path | None = None

    def check(self) -> None:
        """Raise an error if a file cannot be written, before anything long is computed."""
        if self.out is not None:
            _require_room(claim(self.out))
        for option, file in (("--html", self.html), ("--csv", self.csv)):
            if file is not None:
                _claim(option, file)
                _require_room(file)
        named = [("--out", None if self.out is None else claim(self.out)), ("--html", self.html), ("--csv", self.csv)]
        seen: dict[Path, str] = {}
        for option, file in named:
            if file is not None and (other := seen.setdefault(file.resolve(), option)) != option:
                raise CurvlensError(f"{other} and {option} both name {str(file)!r}. Give each option its own file.")

    def write(self, found: Profile) -> Iterator[Path]:
        """Write them, one after the other."""
        if self.out is not None:
            yield found.save(self.out)
        if self.html is not None:
            # Where there are gaps all shares are unknown, as the norm of H is.
            yield _write(self.html, icicle(found, "trace" if math.isnan(found.mismatch) else "share"), ".html")
        if self.csv is not None:
            yield _write(self.csv, commas(found.table()), ".csv")


def show_profile(request: Request, view: View, files: Files) -> None:
    """Compute a profile, print it, and write what is asked for."""
    if view.sort == "top" and not request.top:
        raise CurvlensError("--sort top needs the contributions to λ_max, which --no-top leaves out.")
    files.check()
    posed = pose(request.options)
    say(posed)
    with _warnings_told() as told:
        found = _computed(posed.problem(), request)
    console, err = Console(), Console(stderr=True)
    for warning in dict.fromkeys(told):
        err.print(Text(f"warning: {printable(warning)}", style="yellow"), soft_wrap=True)
    _show(found, view, console)
    for file in files.write(found):
        console.print(f"written: {printable(str(file))}", highlight=False, markup=False, soft_wrap=True)


def _computed(problem: Problem, request: Request) -> Profile:
    """The profile. Meanwhile a bar on the terminal, or a line now and then where that is a file or a pipe."""
    console = Console(stderr=True)
    told = _Lines(console)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("probes", total=request.samples)

        def follow(done: int, total: int | None) -> None:
            more = " and spectral norms" if request.spectral else ""
            last = f"largest eigenvalue{more}" if request.top else "last sums"
            bar.update(task, completed=done, description=last if done == total else "probes")
            if not console.is_terminal:
                told.follow(done, request.samples, last)

        try:
            return profile(
                problem,
                request.samples,
                seed=request.options.seed,
                top=request.top,
                spectral=request.spectral or False,
                memory=request.memory,
                announce=told.announce,
                progress=follow,
            )
        except KeyboardInterrupt:
            bar.stop()
            told.say("Stopped before enough probes were done: there is nothing to show.")
            raise


class _Lines:
    """How far a profile is, as lines: at the beginning, then at most every 10 s."""

    def __init__(self, console: Console) -> None:
        self._console, self._expected = console, ""
        self._started = self._last = time.monotonic()

    def announce(self, forecast: Forecast) -> None:
        """What it will take."""
        self._expected = f" of about {readable_time(forecast.seconds)}"
        self._started = self._last = time.monotonic()
        self.say(str(forecast))

    def follow(self, done: int, total: int, last: str) -> None:
        """A line, if it is time for one."""
        now = time.monotonic()
        if now - self._last < EVERY:
            return
        self._last = now
        gone = readable_time(now - self._started)
        self.say(f"{last}, {gone}" if done == total else f"{done} of {total} probes, {gone}{self._expected}")

    def say(self, text: str) -> None:
        """A line at once."""
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _warnings_told() -> Iterator[list[str]]:
    """Collect our warnings as texts, to print without file and line. Leaves out those that the note contains."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", CurvlensWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, CurvlensWarning):
                if not issubclass(category, NotedWarning):
                    told.append(str(message))
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield told


def _show(found: Profile, view: View, console: Console) -> None:
    """Print the header, the table and the notes."""
    rows = lines(found, view)
    table = fitting(rows, console)
    if not console.is_terminal:
        console.width = max(console.width, width(table, console))
    console.print(Text(printable(found.headline), style="bold"), soft_wrap=True)
    console.print()
    console.print(table)
    console.print()
    for text in footer(found, rows, view):
        console.print(text, soft_wrap=True)


def _require_room(file: Path) -> None:
    """Raise an error if the folder of a file cannot be written to."""
    folder = file.parent
    if not folder.is_dir():
        raise CurvlensError(f"{str(file)!r} cannot be written: there is no folder {str(folder)!r}. Make it first.")
    try:
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} cannot be written: {error.strerror}.") from error


def _claim(option: str, file: Path) -> None:
    """Raise an error if an existing file is not one of ours."""
    if file.is_dir() or str(file) in ("", "."):
        raise CurvlensError(f"{option} {str(file)!r} is a folder, expected a file such as profile.{option[2:]}.")
    disk.require_ours(file, FIX, kind=f".{option[2:]}")


def _write(file: Path, text: str, kind: str) -> Path:
    try:
        return disk.write(file, text, seal=kind, fix=FIX)
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} could not be written: {error.strerror}.") from error
