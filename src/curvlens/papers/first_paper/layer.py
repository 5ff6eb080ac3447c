"""One attention layer with square loss, as in the theorems: the norms of its blocks, and their curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from curvlens.calculus.attention import AttentionHessian
from curvlens.papers.parts import SPLIT, signed
from curvlens.papers.sizes import sized
from curvlens.papers.sweeps import Sweep, sweep
from curvlens.report.charts import Curve
from curvlens.study import Record

BLOCKS = ("QQ", "KK", "VV", "QK", "VQ", "VK")
LENGTH, WIDTH = 12, 8


def norms(H: AttentionHessian) -> dict[str, list[float | str]]:
    """‖H_o‖ and ‖H_f‖ of every block."""
    return {
        block: [
            0.0 if block == "VV" and part == "functional" else sized(H.norm((block[0], block[1]), part))
            for part in SPLIT
        ]
        for block in BLOCKS
    }


def line(records: Sequence[Record], over: str, block: str, part: str) -> Sweep:
    """The norm of a block's part over an entry of the configurations."""
    return sweep(records, over, "norms", block, SPLIT.index(cast(Any, part)))


def curves(records: Sequence[Record], over: str, chosen: Iterable[tuple[str, str]]) -> list[Curve]:
    """Those of some blocks and parts."""
    return [
        line(records, over, block, part).curve(f"${signed(part, block)}$", colour=i)
        for i, (block, part) in enumerate(chosen)
    ]
