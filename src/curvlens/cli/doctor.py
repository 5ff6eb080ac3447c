"""``curvlens doctor``: check a problem, or a Hugging Face model on a text, for what would make results wrong."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from curvlens.checkup import Report, doctor
from curvlens.cli.targets import posed
from curvlens.problem import Problem
from curvlens.report.terminal.tables import findings


def show_findings(target: str, text: Path | None, *, tokens: int | None, sequences: int | None) -> bool:
    """Print the findings of the doctor. Returns whether there is no error."""
    made = posed(target, text, tokens=tokens, sequences=sequences)
    report = doctor(made) if isinstance(made, Problem) else doctor(*made)
    _show(report)
    return report.ok


def _show(report: Report) -> None:
    console = Console(soft_wrap=True)
    headline, *_ = str(report).splitlines()
    console.print(headline, highlight=False)
    found = ((each.severity, each.headed, (each.what, each.effect, f"fix: {each.fix}")) for each in report)
    for line in findings(found):
        console.print(line, highlight=False)
