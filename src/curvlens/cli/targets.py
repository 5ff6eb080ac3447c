"""Load the problem that a user names: own code that returns one, or a Hugging Face model on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from curvlens import files
from curvlens.cli.code import from_code, is_code
from curvlens.cli.defaults import SEQUENCES, TOKENS
from curvlens.cli.models import with_weights
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses import CausalLM
from curvlens.problem import Problem

Posed = Problem | tuple[nn.Module, Any, Any]
"""A problem, or the model, data and loss that one would be made of."""


LARGEST = 256 << 20
"""Bytes of a text."""


def posed(target: str, text: Path | None, *, tokens: int | None, sequences: int | None, double: bool = False) -> Posed:
    """What a target is: ``file.py:name``, or a Hugging Face folder or name with a text, in float64 if asked for."""
    if is_code(target):
        if double:
            raise CurvlensError(f"--double is for Hugging Face models. In {target} write model.double() yourself.")
        given = {"--text": text, "--tokens": tokens, "--sequences": sequences}
        for option in (name for name, value in given.items() if value is not None):
            raise CurvlensError(f"{option} is for Hugging Face models. {target} brings its own data.")
        return _checked(from_code(target), target)
    if text is None:
        raise CurvlensError("A Hugging Face model needs a text. Give one: --text file.txt.")
    if not text.is_file():
        raise CurvlensError(f"There is no file {str(text)!r}.")
    model, tokenizer = with_weights(target)
    batch = _batch(tokenizer, text, tokens or TOKENS, sequences or SEQUENCES)
    return model.double() if double else model, batch, CausalLM()


def _checked(made: Any, target: str) -> Posed:
    if isinstance(made, Problem) or (isinstance(made, tuple) and len(made) == 3):
        return made
    raise CurvlensError(
        f"{target} returned {a_kind(made)}, expected a curvlens.Problem or a tuple (model, data, loss), or a "
        "function that returns one."
    )


def _batch(tokenizer: Any, text: Path, tokens: int, sequences: int) -> Any:
    """The beginning of a text, cut into sequences of one length."""
    try:
        words = files.read(text, LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise CurvlensError(f"{str(text)!r} cannot be read: {why}.") from error
    ids = tokenizer(words, return_tensors="pt")["input_ids"][0]
    rows = min(sequences, len(ids) // tokens)
    if not rows:
        raise CurvlensError(
            f"{str(text)!r} has {len(ids)} tokens, not enough for one sequence of {tokens}. Use --tokens."
        )
    return {"input_ids": ids[: rows * tokens].view(rows, tokens)}
