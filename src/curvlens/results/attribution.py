"""The curvature along one direction, split by block and by module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import printable
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.by_block import ByBlock
from curvlens.results.status import Status

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
            raise KeyError("The parts of modules were not computed. Call attribute(..., modules=True).")
        start = f"{path}." if path else ""
        below = [part for known, part in self.modules.items() if known == path or known.startswith(start)]
        if not below:
            raise KeyError(f"No module {path!r} has a part. Paths with a part: {', '.join(self.modules)}.")
        return sum(below)

    def table(self) -> list[dict[str, Any]]:
        """A record for each block: its part, and its share of the total."""
        return [
            {self.blocks.by: name, "part": float(part), "share": float(part) / self.total if self.total else None}
            for name, part in self.blocks.items()
        ]

    def _pictured(self) -> Result:
        return self.blocks

    def __float__(self) -> float:
        return self.total

    def __repr__(self) -> str:
        largest = sorted(self.blocks.items(), key=lambda pair: -abs(float(pair[1])))[:SHOWN]

        def share(part: float) -> str:
            return f"{100 * part / self.total:.3g} %" if self.total else f"{part:.3g}"

        named = ", ".join(f"{name} {share(float(part))}" for name, part in largest)
        split = "" if self.ggn is None else f"; G {share(self.ggn)}, functional {share(self.functional or 0.0)}"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Attribution(uᵀHu = {self.total:.6g}, along u {self.curvature:.6g}; by {self.blocks.by}: {named}{split}"
            f"{note})"
        )
