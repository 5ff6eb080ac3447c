"""What Figures 3 and 5 share: the blocks of attention over the size σ of the embeddings, measured and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from curvlens.calculus import exponents
from curvlens.calculus.form import SplitPart
from curvlens.papers.experiment import Effort, Law
from curvlens.papers.parts import PARTS, SIGNS
from curvlens.papers.setting import Norm, block_hessian
from curvlens.papers.sizes import sized
from curvlens.papers.sweeps import Sweep, grid, sweep
from curvlens.report.charts import Panel, Slope
from curvlens.study import Config, Record

DIAGONAL = ("Q", "K", "V", "O")
PAIRS = ("QK", "QV", "QO", "KV", "KO", "VO")
SMALL, WHOLE, LARGE = (0.01, 0.1), (0.01, 10.0), (1.0, 10.0)
LIMIT = (0.001, 0.00316228)
"""So small that the powers of the limit are met in deep networks, too."""
WIDTH = 128
CROSSED = 5
"""Repeats for the blocks off the diagonal, which cost ten times as much."""
STYLES: dict[SplitPart, dict[str, Any]] = {
    "outer": {"colour": 0},
    "functional": {"colour": 1},
    "total": {"colour": 6, "style": "dashed"},
}


def sigmas(effort: Effort) -> list[float]:
    """From 0.01 to 10."""
    return grid(*WHOLE, 10 if effort.quick else 20)


def points(norm: Norm, effort: Effort, places: Sequence[float]) -> list[Config]:
    """Blocks with norms or without, at some σ; the draws of a seed are the same at all of them."""
    width = 32 if effort.quick else WIDTH
    return [
        {"width": width, "norm": norm, "sigma": sigma, "seed": seed, "pairs": seed < CROSSED}
        for seed in effort.repeats(5, 20)
        for sigma in places
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of each block, exact."""
    H = block_hessian(config["width"], sigma=config["sigma"], seed=config["seed"], norm=config["norm"])
    found = {}
    for block in (*DIAGONAL, *(PAIRS if config["pairs"] else ())):
        hollow = config["norm"] == "none" and block in ("V", "O")
        values: list[float | str] = []
        for part in PARTS:
            value = H.norm(block if len(block) == 1 else (block[0], block[1]), part)
            values.append(value if hollow and part == "functional" else sized(value))
        found[block] = values
    return {"norms": found}


def curve(records: Sequence[Record], block: str, part: str) -> Sweep:
    """The norm of a block over σ."""
    having = [record for record in records if block in record.result["norms"]]
    return sweep(having, "sigma", "norms", block, PARTS.index(part))


def pair(block: str) -> str:
    """Both letters of a block; those on the diagonal are stored under one.

    >>> pair("Q"), pair("QK")
    ('QQ', 'QK')
    """
    return block if len(block) == 2 else block * 2


def equation_5(part: Literal["outer", "functional"], block: str) -> int | None:
    """The predicted power of σ; None where the part is zero."""
    return exponents.predicted(part, pair(block)).data


def _parts(records: Sequence[Record], block: str) -> list[tuple[SplitPart, Sweep]]:
    """Those of a block that are not zero."""
    found = [(part, curve(records, block, part)) for part in PARTS]
    return [(part, line) for part, line in found if not bool((line.values == 0).all())]


def panel(records: Sequence[Record], block: str, title: str, slopes: Sequence[Slope] = ()) -> Panel:
    """The norms of a block's parts over σ."""
    return Panel(
        [
            found.curve(rf"$\|{SIGNS[part]}({_letters(block)})\|_F$", **STYLES[part])
            for part, found in _parts(records, block)
        ],
        slopes,
        title,
        r"standard deviation $\sigma$ of the embeddings",
        "Frobenius norm",
        "log",
        "log",
        lines=(1.0,),
    )


def _letters(block: str) -> str:
    return ", ".join(f"W_{letter}" for letter in pair(block))


def local(records: Sequence[Record], block: str, y_lines: Sequence[float]) -> Panel:
    """Local slopes of a block's parts, with lines at some powers."""
    return Panel(
        [found.local(f"${SIGNS[part]}$", **STYLES[part]) for part, found in _parts(records, block)],
        title=f"local slope, {'query' if block == 'Q' else 'value'}",
        x_label=r"$\sigma$",
        y_label=r"$d\,\log\|\cdot\|\,/\,d\,\log\sigma$",
        x_scale="log",
        lines=(1.0,),
        y_lines=y_lines,
    )


def laws(records: Sequence[Record], *, predicted: bool) -> tuple[Law, ...]:
    """Of every block and part that is not zero; W_O is not in Equation 5."""
    found = []
    for block in (*DIAGONAL, *PAIRS):
        for part, line in _parts(records, block):
            power = None
            if predicted and part != "total" and "O" not in block:
                power = equation_5(part, block)
            found.append(line.fitted(f"{SIGNS[part]}({block[0]}, {block[-1]})", power))
    return tuple(found)
