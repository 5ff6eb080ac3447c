"""``curvlens doctor``: look at a model, its data and its loss: what would make results wrong?"""

from __future__ import annotations

from rich.console import Console

from curvlens.checkup import Report, doctor
from curvlens.cli.defaults import Options
from curvlens.cli.door import pose
from curvlens.cli.said import say
from curvlens.report.terminal.tables import findings


def show_findings(options: Options) -> bool:
    """Print what the doctor finds; whether there is no error."""
    posed = pose(options)
    say(posed)
    report = doctor(posed.model, posed.data, posed.loss) if posed.given is None else doctor(posed.given)
    _show(report)
    return report.ok


def _show(report: Report) -> None:
    console = Console(soft_wrap=True)
    headline, *_ = str(report).splitlines()
    console.print(headline, highlight=False)
    found = ((each.severity, each.headed, (each.what, each.effect, f"fix: {each.fix}")) for each in report)
    for line in findings(found):
        console.print(line, highlight=False)
