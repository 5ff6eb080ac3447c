"""What a user did not ask for in words: which loss and which data were taken, beside the results."""

from __future__ import annotations

from rich.console import Console

from curvlens.cli.code import is_code
from curvlens.cli.door import Posed
from curvlens.errors import printable


def say(posed: Posed) -> None:
    """Two lines on the error stream, so that results can be piped. Own code knows what it returned."""
    if is_code(posed.target):
        return
    console = Console(stderr=True)
    for sentence in (posed.loss_sentence, posed.data_sentence):
        console.print(printable(sentence), style="dim", highlight=False, markup=False, soft_wrap=True)
