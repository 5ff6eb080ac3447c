"""``curvlens doctor``: look at a problem, or a Hugging Face model on a text: what would make results wrong?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from curvlens.checkup import Report, doctor
from curvlens.cli.targets import posed
from curvlens.problem import Problem

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show_findings(target: str, text: Path | None, *, tokens: int | None, sequences: int | None) -> bool:
    """Print what the doctor finds; whether there is no error."""
    made = posed(target, text, tokens=tokens, sequences=sequences)
    report = doctor(made) if isinstance(made, Problem) else doctor(*made)
    _show(report)
    return report.ok


def _show(report: Report) -> None:
    console = Console(soft_wrap=True)
    headline, *_ = str(report).splitlines()
    console.print(headline, highlight=False)
    for finding in report:
        console.print(f"[{COLOURS[finding.severity]}]{finding.severity:<8}[/]{escape(finding.headed)}", highlight=False)
        for line in (finding.what, finding.effect, f"fix: {finding.fix}"):
            console.print(f"        {escape(line)}", highlight=False)
