"""``curvlens reproduce``: the papers' experiments, measured, drawn and judged."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from curvlens.cli.pages import Pages
from curvlens.errors import CurvlensError, nearest, printable
from curvlens.papers import EXPERIMENTS, Effort, Experiment, Report, measured, missing, named, run
from curvlens.papers.claims import CLAIMS
from curvlens.papers.reference import compared
from curvlens.papers.shown import Shown, with_error
from curvlens.report.terminal import tables
from curvlens.study import Study, StudyProgress
from curvlens.study.budget import readable_time

QUIET = 30.0
"""Seconds between lines of progress if the output is not a terminal."""


@dataclass(frozen=True)
class Wanted:
    """The options of one call of the command."""

    names: Sequence[str]
    effort: Effort
    results: Path
    jobs: int
    set_aside: bool = False

    @classmethod
    def of(
        cls, names: Sequence[str], quick: bool, seeds: int | None, results: Path, jobs: int | None, set_aside: bool
    ) -> Wanted:
        """Options as they are typed, with defaults filled in."""
        return cls(names, Effort(quick, seeds), results, jobs or cores(), set_aside)


def show_experiments(wanted: Wanted) -> None:
    """List the experiments, or measure some and write their pages."""
    study = Study(wanted.results)
    console = Console()
    if wanted.set_aside:
        _set_aside(study, console)
    if not wanted.names:
        _list(wanted, study, console)
        return
    chosen = _chosen(wanted.names)
    pages = Pages(study, wanted.effort)
    pages.check()
    try:
        _measure(chosen, wanted, study)
    except KeyboardInterrupt:
        left = len(missing(chosen, wanted.effort, study))
        _stopped(f"with {left} points left. Measured points are in {wanted.results}; run the same command to continue.")
        raise
    try:
        _show(chosen, wanted, study, pages, console)
    except KeyboardInterrupt:
        _stopped(f"while writing pages. All points are in {wanted.results}; run the same command to write the pages.")
        raise


def _stopped(text: str) -> None:
    Console(stderr=True).print(f"Stopped {text}", highlight=False, markup=False)


def _show(chosen: Sequence[Experiment], wanted: Wanted, study: Study, pages: Pages, console: Console) -> None:
    """Judge and draw all complete experiments, and print the chosen ones."""
    told = Console(stderr=True)
    if not told.is_terminal:
        told.print("judging and drawing", highlight=False)
    with told.status("judging and drawing"):
        shown = [each for each in (_shown(each, wanted.effort, study) for each in EXPERIMENTS) if each is not None]
        if not shown:
            raise CurvlensError(_nothing(wanted))
        records = {key: record for each in EXPERIMENTS for key, record in study.records(each.stored_as).items()}
        written = pages.write(shown, records)
    _tell([each for each in shown if each.experiment in chosen], console)
    *others, page = written
    for file in others:
        console.print(f"written: {printable(str(file))}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"\nOpen {printable(str(page))} for all verdicts and figures.", highlight=False, markup=False, soft_wrap=True
    )


def _nothing(wanted: Wanted) -> str:
    folder = wanted.results
    if not folder.is_dir():
        return f"There is no folder {str(folder)!r}. Measure first: curvlens reproduce all --quick."
    others = sorted(page.parent.name for page in folder.glob("*/index.html"))
    there = f"There are pages of: {', '.join(others)}." if others else "Measure first: curvlens reproduce all --quick."
    return f"No experiment is complete with the settings {wanted.effort.name!r} in {str(folder)!r}. {there}"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chosen(names: Sequence[str]) -> list[Experiment]:
    known = [each.name for each in EXPERIMENTS]
    for name in names:
        if name not in (*known, "all", "verdicts"):
            hint = nearest(name, [*known, "all", "verdicts"])
            raise CurvlensError(f"There is no experiment {name[:60]!r}. {hint} `curvlens reproduce` alone lists them.")
    if "verdicts" in names:
        if len(names) > 1:
            raise CurvlensError(
                "'verdicts' writes the page from stored points. Give it alone: curvlens reproduce verdicts."
            )
        return []
    return list(EXPERIMENTS) if "all" in names else [named(name) for name in dict.fromkeys(names)]


def _list(wanted: Wanted, study: Study, console: Console) -> None:
    rows = []
    for each in EXPERIMENTS:
        points = len(each.points(wanted.effort))
        left = len(missing([each], wanted.effort, study))
        rows.append((each.name, each.title, each.source, f"{points - left} of {points}"))
    titles = ("name", "what", "from", "measured")
    folding = {title: {"overflow": "fold"} for title in titles}
    shown = tables.table(titles, rows, options=folding, box=None, pad_edge=False, header_style="bold")
    console.print(shown)
    console.print(
        "\ncurvlens reproduce NAME … measures and draws some; 'all' takes all of them; --quick takes minutes. "
        "'verdicts' writes the page again from stored points.",
        soft_wrap=True,
    )


def _measure(chosen: Sequence[Experiment], wanted: Wanted, study: Study) -> None:
    if not chosen:
        return
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("points", total=None, left="")

        told = time.monotonic()

        def follow(now: StudyProgress) -> None:
            nonlocal told
            left = "" if now.left is None else f"about {readable_time(now.left)} left"
            bar.update(task, completed=now.done, total=now.total, description=now.last, left=left)
            if not console.is_terminal and time.monotonic() - told > QUIET:
                console.print(f"{now.done} of {now.total} points, last of {now.last}, {left}", highlight=False)
                told = time.monotonic()

        run(chosen, wanted.effort, study, jobs=wanted.jobs, progress=follow)


def _shown(experiment: Experiment, effort: Effort, study: Study) -> Shown | None:
    """The report of an experiment with all its points, or None."""
    records = measured(experiment, effort, study)
    if not records or len(records) < len(experiment.points(effort)):
        return None
    try:
        report = experiment.report(records)
    except CurvlensError as error:  # of one experiment; the others are shown
        report = Report(notes=(f"These points could not be judged: {error}",))
    return Shown.over(experiment, report, records)


def _tell(shown: Sequence[Shown], console: Console) -> None:
    statements = {claim.name: claim.statement for claim in CLAIMS}
    plain: dict[str, Any] = {"highlight": False, "soft_wrap": True}
    for each in shown:
        console.print(f"\n[bold]{each.experiment.name}[/bold]  {each.experiment.title}", highlight=False)
        for comparison in compared(each.report.numbers):
            colour = {"agrees": "green", "differs": "red"}.get(comparison.outcome, "yellow")
            ours, reference = comparison.measured, comparison.reference
            console.print(
                f"  {reference.what}: {with_error(ours.value, ours.error)}, {reference.source} "
                f"{with_error(reference.value, reference.half)}: [{colour}]{comparison.outcome}[/{colour}]",
                highlight=False,
                soft_wrap=True,
            )
        for finding in each.report.findings:
            regime = f" {finding.regime}" if finding.regime else ""
            console.print(f"  [bold]{finding.verdict}[/bold]{escape(regime)}: {statements[finding.claim]}", **plain)
            console.print(f"    {finding.measured}", markup=False, style="dim", **plain)
        for note in each.report.notes:
            console.print(f"  {note}", style="yellow", markup=False, **plain)


def _set_aside(study: Study, console: Console) -> None:
    """Move unreadable files away."""
    for file in study.set_aside(dict.fromkeys(each.stored_as for each in EXPERIMENTS)):
        console.print(f"moved away: {printable(str(file))}", highlight=False, markup=False, soft_wrap=True)
