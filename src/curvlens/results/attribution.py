"""The curvature along one direction, split by block and by module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import CurvlensError, nearest, printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.by_block import ByBlock
from curvlens.results.status import Status

GGN, ROOT = "G", "the model itself"
"""Names of the Gauss–Newton part, and of the code of the outermost module, in tables and pictures."""
SHOWN = 5
"""Blocks that a printed result names."""


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Result):
    """uᵀHu = Σ_b u_bᵀ(Hu)_b = uᵀGu + Σ_m uᵀM_m u, exact up to rounding."""

    total: float
    """uᵀHu."""
    norm: float
    """‖u‖."""
    blocks: ByBlock
    """u_bᵀ(Hu)_b for each block. They add up to ``total``. A part can be negative: its block bends with the others."""
    pairs: Tensor | None = None
    """(n, n): u_aᵀ H u_b for all pairs of the blocks, with ``pairs=True``. Row sums are ``blocks``."""
    ggn: float | None = None
    """uᵀGu, with ``modules=True``."""
    modules: dict[str, float] | None = None
    """uᵀM_m u for the own code of each module, by path, with ``modules=True``. With ``ggn`` they add up to
    ``total``."""
    mismatch: float = 0.0
    """By how much the parts by module and ``total`` differ, as a share of the sum of their sizes."""
    products: int = 1
    status: Status = Status.EXACT
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pairs is not None:
            require_tensors(self, "pairs")

    @property
    def curvature(self) -> float:
        """uᵀHu/‖u‖², the curvature along u."""
        return self.total / self.norm**2

    @property
    def functional(self) -> float | None:
        """uᵀFu = Σ_m uᵀM_m u, with ``modules=True``."""
        return None if self.modules is None else sum(self.modules.values())

    def inside(self, path: str) -> float:
        """The part of a module and of all modules inside it. ``""`` is the whole model."""
        if self.modules is None:
            raise CurvlensError("The parts of modules were not computed. Call attribute(..., modules=True).")
        start = f"{path}." if path else ""
        below = [part for known, part in self.modules.items() if known == path or known.startswith(start)]
        if not below:
            raise CurvlensError(f"No module {path!r} has a part. {nearest(path, [p for p in self.modules if p])}")
        return sum(below)

    def table(self) -> list[dict[str, Any]]:
        """A record for each block: its part, and its share of the total."""
        return [
            {self.blocks.by: name, "part": float(part), "share": float(part) / self.total if self.total else None}
            for name, part in self.blocks.items()
        ]

    def module_table(self) -> list[dict[str, Any]]:
        """A record for G and for the own code of each module that has a part, the largest first."""
        if self.modules is None or self.ggn is None:
            raise CurvlensError("The parts of modules were not computed. Call attribute(..., modules=True).")
        parts = {GGN: self.ggn} | {path or ROOT: part for path, part in self.modules.items() if part}
        largest = sorted(parts.items(), key=lambda pair: -abs(pair[1]))
        return [
            {"module": name, "part": part, "share": part / self.total if self.total else None} for name, part in largest
        ]

    def pair_table(self) -> list[dict[str, Any]]:
        """A record for each pair of blocks a, b: u_aᵀ H u_b."""
        if self.pairs is None:
            raise CurvlensError("The parts of pairs were not computed. Call attribute(..., pairs=True).")
        names = list(self.blocks)
        return [
            {"block": a, "with": b, "part": part, "share": part / self.total if self.total else None}
            for a, row in zip(names, self.pairs.tolist(), strict=True)
            for b, part in zip(names, row, strict=True)
        ]

    def __float__(self) -> float:
        return self.total

    def __repr__(self) -> str:
        largest = sorted(self.blocks.items(), key=lambda pair: -abs(float(pair[1])))[:SHOWN]

        def share(part: float) -> str:
            return f"{100 * part / self.total:.3g} %" if self.total else f"{part:.3g}"

        named = ", ".join(f"{name} {share(float(part))}" for name, part in largest)
        split = ""
        if self.ggn is not None:
            own = [row for row in self.module_table() if row["module"] != GGN][:SHOWN]
            modules = ", ".join(f"{row['module']} {share(row['part'])}" for row in own)
            split = f"; G {share(self.ggn)}, functional {share(self.functional or 0.0)}"
            split += f"; by module: {modules}" if modules else ""
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Attribution(uᵀHu = {self.total:.6g}, uᵀHu/‖u‖² = {self.curvature:.6g}; by {self.blocks.by}: {named}"
            f"{split}{note})"
        )
