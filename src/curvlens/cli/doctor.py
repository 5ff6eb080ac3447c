"""``curvlens doctor``: look at a problem, or a Hugging Face model on a text: what would make results wrong?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from curvlens.cli.models import from_code, is_code, with_weights
from curvlens.doctor import Report, doctor
from curvlens.errors import CurvlensError
from curvlens.losses import CausalLM
from curvlens.problem import Problem

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show_findings(target: str, text: Path | None, *, tokens: int, sequences: int) -> bool:
    """Print what the doctor finds; whether there is no error."""
    if is_code(target):
        report = _examined(from_code(target), target)
    elif text is None:
        raise CurvlensError("A Hugging Face model needs a text to be looked at on: --text file.txt.")
    else:
        model, tokenizer = with_weights(target)
        report = doctor(model, _batch(tokenizer, text, tokens, sequences), CausalLM())
    _show(report)
    return report.ok


def _examined(made: Any, target: str) -> Report:
    if isinstance(made, Problem):
        return doctor(made)
    if isinstance(made, tuple) and len(made) == 3:
        return doctor(*made)
    raise CurvlensError(
        f"{target} gave a {type(made).__name__}, expected a curvlens.Problem or a tuple (model, data, loss), or a "
        "function that returns one."
    )


def _batch(tokenizer: Any, text: Path, tokens: int, sequences: int) -> Any:
    """The beginning of a text, cut into sequences of one length."""
    if not text.is_file():
        raise CurvlensError(f"There is no file {str(text)!r}.")
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]
    rows = min(sequences, len(ids) // tokens)
    if not rows:
        raise CurvlensError(
            f"{str(text)!r} has {len(ids)} tokens, not enough for one sequence of {tokens}. Use --tokens."
        )
    return {"input_ids": ids[: rows * tokens].view(rows, tokens)}


def _show(report: Report) -> None:
    console = Console(soft_wrap=True)
    headline, *_ = str(report).splitlines()
    console.print(headline, highlight=False)
    for finding in report:
        console.print(f"[{COLOURS[finding.severity]}]{finding.severity:<8}[/]{escape(finding.headed)}", highlight=False)
        for line in (finding.what, finding.effect, f"fix: {finding.fix}"):
            console.print(f"        {escape(line)}", highlight=False)
