"""What the command line says in its help: nothing here imports torch, so that help comes at once."""

from typing import Literal

TOKENS, SEQUENCES = 64, 4
"""How long sequences of a text are, and how many, if nothing is said."""
Sort = Literal["order", "trace", "share", "frobenius", "top"]
"""How the rows of a profile are sorted."""
