"""Defaults that the help shows. Nothing here imports torch, so `--help` is fast."""

from typing import Literal

TOKENS, SEQUENCES = 64, 4
"""Default length and number of the sequences of a text."""
Sort = Literal["order", "trace", "share", "frobenius", "top"]
"""How the rows of a profile are sorted."""
