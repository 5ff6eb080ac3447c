"""The parts of the Hessian, H = H_o + H_f, by the names of the papers."""

from __future__ import annotations

from typing import Literal

from curvlens.calculus.form import SplitPart

SPLIT: tuple[Literal["outer", "functional"], ...] = ("outer", "functional")
PARTS: tuple[SplitPart, ...] = (*SPLIT, "total")
SIGNS = {"outer": "H_o", "functional": "H_f", "total": "H"}


def signed(part: str, block: str) -> str:
    """A block's part, as it is written.

    >>> signed("outer", "QK")
    'H_o(Q,K)'
    """
    return f"{SIGNS[part]}({block[0]},{block[1]})"
