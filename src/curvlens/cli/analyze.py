"""``curvlens analyze``: measure within a budget, say it on one screen, and write the page."""

from __future__ import annotations

import pickle
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from curvlens.analysis import Analysis, Now, Plan, analyze
from curvlens.cli.defaults import Options
from curvlens.cli.door import pose
from curvlens.cli.said import say
from curvlens.errors import CurvlensError, printable
from curvlens.memory import readable
from curvlens.report.terminal import tables
from curvlens.report.terminal.analysis import summary
from curvlens.study.budget import parse_budget, readable_time

SAVE = "Save it by torch.save(optimizer.state_dict(), 'optimizer.pt')."
EVERY = 15.0
"""Seconds between two lines of progress where the output is no terminal."""


@dataclass(frozen=True)
class Wanted:
    """What a user asked for."""

    options: Options
    out: Path
    budget: str
    memory: str | None = None
    optimizer: Path | None = None
    minimal: bool = False
    private: bool = False
    dry_run: bool = False


def show_analysis(wanted: Wanted) -> bool:
    """Analyse, print and write; whether it was not interrupted."""
    console, err = Console(soft_wrap=True), Console(stderr=True)
    parse_budget(wanted.budget)  # before a model is loaded for minutes
    state = None if wanted.optimizer is None else _state(wanted.optimizer)
    posed = pose(wanted.options)
    say(posed)
    with _told(err) as told, _terminated_as_interrupted():

        def announce(plan: Plan) -> None:
            told.stop()
            _show_plan(plan, console if wanted.dry_run else err)
            if not wanted.dry_run:
                told.start()

        analysis = analyze(
            posed.problem(),
            wanted.out,
            wanted.budget,
            memory=wanted.memory,
            optimizer=state,
            seed=wanted.options.seed,
            name=posed.name,
            decode=posed.decode,
            minimal=wanted.minimal,
            private=wanted.private,
            dry_run=wanted.dry_run,
            about={"command": _command(wanted), "loss": posed.loss_sentence, "data": posed.data_sentence},
            announce=announce,
            progress=told,
        )
    if wanted.dry_run:
        return True
    _show(analysis, console)
    return bool(analysis.content["ended"] != "interrupted")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which batch systems send before they kill, ends an analysis as Ctrl-C does: with its page."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(analysis: Analysis, console: Console) -> None:
    for line in summary(analysis.content, colours=console.color_system is not None):
        console.print(line, highlight=False)
    ended = analysis.content["ended"]
    if ended == "interrupted":
        console.print("\nInterrupted. The same command goes on where it was.", style="yellow")
    for failure in analysis.content["failed"]:
        said = f"not measured: {printable(failure['kind'])}: {printable(failure['why'])}"
        console.print(Text(said, style="yellow"))
    console.print(Text(f"\npage: {printable(str(analysis.page))}"))


def _show_plan(plan: Plan, console: Console) -> None:
    rows = [(name, knows, units, time) for name, knows, units, time in plan.rows()]
    titles = ("stage", "what it will know", "units", "time")
    console.print(tables.table(titles, rows, numbers=("units", "time"), box=None))
    console.print(
        f"One gradient takes {plan.seconds_per_gradient:.2g} s. In all about {readable_time(plan.seconds)}, and "
        f"{readable(plan.memory)} beside the model.",
        highlight=False,
    )


class _Told:
    """Follows an analysis: one line that changes in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, -EVERY
        columns = (
            TextColumn("{task.fields[stage]:<10}"),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=1.0, stage="")

    def start(self) -> None:
        """Show it."""
        if self._bar is not None:
            self._bar.start()

    def stop(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, now: Now) -> None:
        left = "" if now.left is None else f", {readable_time(now.left)} left"
        inside = "" if now.inside is None else f" {now.inside[0]}" + (f"/{now.inside[1]}" if now.inside[1] else "")
        text = f"{printable(now.what)}{inside}{left}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=now.spent, description=text, stage=now.stage)
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._console.print(Text(f"{100 * now.spent:3.0f} %  {now.stage}: {text}"), soft_wrap=True)


@contextmanager
def _told(console: Console) -> Iterator[_Told]:
    told = _Told(console)
    told.start()
    try:
        yield told
    finally:
        told.stop()


def _state(file: Path) -> Mapping[str, Any]:
    """The state of an optimiser; nothing in the file is run."""
    if file.exists() and not file.is_file():
        raise CurvlensError(f"--optimizer {str(file)!r} is no regular file. {SAVE}")  # a pipe would block for ever
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zip, or the system
        raise CurvlensError(
            f"{str(file)!r} could not be read as the state of an optimiser: {_why(error)}. {SAVE}"
        ) from error
    if isinstance(found, Mapping) and "param_groups" not in found:
        inner = [found[name] for name in ("optimizer", "optimizer_state_dict") if name in found]
        found = inner[0] if inner else found
    if not isinstance(found, Mapping) or "param_groups" not in found or "state" not in found:
        raise CurvlensError(
            f"{str(file)!r} holds no state of an optimiser: it has no 'param_groups' and 'state'. {SAVE}"
        )
    return found


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        return (
            "it is no file of tensors and numbers alone, and nothing else is loaded, because loading pickle runs code"
        )
    return type(error).__name__


def _command(wanted: Wanted) -> str:
    """The command line that gives the same analysis again."""
    options = wanted.options
    words = ["curvlens", "analyze", options.target]
    for name, value in options.given().items():
        words += [name] if value is True else [name, str(value)]
    words += ["--budget", wanted.budget, "--out", str(wanted.out)]
    if options.seed:
        words += ["--seed", str(options.seed)]
    if wanted.optimizer is not None:
        words += ["--optimizer", str(wanted.optimizer)]
    if wanted.memory is not None:
        words += ["--memory", wanted.memory]
    return shlex.join([*words, *(["--minimal"] if wanted.minimal else []), *(["--private"] if wanted.private else [])])
