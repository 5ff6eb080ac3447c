"""Where the curvature of a model comes from, as a tree of its modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from curvlens.errors import CurvlensError, nearest
from curvlens.results.base import Provenance, Result
from curvlens.results.estimate import Estimate

DIGITS = {"trace": 4, "share": 4, "frobenius": 4, "top": 3, "spectral": 4}
"""What is known of a term, with the digits in which a table shows it where the error is smaller."""


@dataclass(frozen=True, eq=False)
class Portion(Result):
    """What is known of one symmetric term M of H = G + Σ M."""

    trace: Estimate
    """tr M; the traces of all terms add up to tr H."""
    frobenius: Estimate
    """‖M‖_F, which does not add up."""
    share: Estimate
    """⟨M, H⟩/‖H‖²_F; the shares of all terms add up to 1, and may be negative."""
    top: Estimate | None = None
    """uᵀ M u for the eigenvector u of the largest eigenvalue of H; these add up to the eigenvalue."""
    spectral: Estimate | None = None
    """‖M‖₂, if it was asked for."""


@dataclass(frozen=True, eq=False, repr=False)
class Row(Result):
    """A module, or a step of attention: its functional part, and how much of it is its own."""

    path: str
    kind: str
    """The class of the module, or scores, softmax, mix."""
    own: Portion
    """Of its own code, without the modules in it."""
    total: Portion
    """With all that is in it."""

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"Row({self.path!r}, {self.kind}, own trace {self.own.trace}, total trace {self.total.trace})"


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Result):
    """H = GGN + Σ_m M_m, term by term: ``profile["h.0.attn"].total.trace`` ± its error.

    Norms are those of each term by itself: only traces, shares and contributions to the largest eigenvalue add up.
    """

    hessian: Portion
    ggn: Portion
    rows: dict[str, Row]
    """By path, each module before what is in it; the first, "", is the model."""
    mismatch: float
    """How far the terms are from adding up to zᵀHz, computed independently: the worst of all probes, as a share of the
    sum of their sizes."""
    samples: int
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __getitem__(self, path: str) -> Row:
        if path not in self.rows:
            raise CurvlensError(f"The profile has no module {path!r}. {nearest(path, self.rows)}")
        return self.rows[path]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def children(self, path: str = "") -> list[Row]:
        """The rows right below a path."""
        return self.tree()[self[path].path]

    def tree(self) -> dict[str, list[Row]]:
        """The rows right below every path, in the order of the model."""
        below: dict[str, list[Row]] = {path: [] for path in self.rows}
        for row in self:
            parent = next((p for p in reversed(above(row.path)) if p in below), None)
            if parent is not None:
                below[parent].append(row)
        return below

    @property
    def adds_up(self) -> bool:
        """Whether the terms are the Hessian to rounding; not if there are gaps."""
        return bool(self.mismatch <= sum_tolerance(getattr(torch, self.provenance.get("dtype", "float64"))))

    def depth(self, path: str) -> int:
        """How many rows are above it."""
        return sum(p in self.rows for p in above(path))

    @property
    def headline(self) -> str:
        """What was looked at, in a line."""
        facts, about = [self.rows[""].kind], self.provenance
        if "shape" in about:
            facts.append(f"{about['shape'][0]:,} parameters")
        if "n_tokens" in about:
            facts.append(f"{float(about['n_tokens']):,.10g} tokens")
        if "dtype" in about:
            facts.append(str(about["dtype"]))
        return "Curvature of " + ", ".join([*facts, f"{self.samples} probes"])

    @property
    def check(self) -> str:
        """What the comparison with zᵀHz says, in a line."""
        if math.isnan(self.mismatch):
            return "whether the rows add up to zᵀHz is not known: there are gaps"
        size = f"{self.mismatch:.1g} of the sum of their sizes"
        return f"rows add up to zᵀHz within {size}" if self.adds_up else f"rows do not add up to zᵀHz: off by {size}"

    def __repr__(self) -> str:
        return (
            f"Profile({len(self.rows)} rows, {self.samples} probes; trace {self.hessian.trace} = GGN {self.ggn.trace} "
            f"+ functional {self.rows[''].total.trace}; adds up to {self.mismatch:.1g})"
        )

    def __str__(self) -> str:
        """The tree as a table."""
        named = [("Hessian", self.hessian), ("  GGN", self.ggn)]
        named += [(f"{'  ' * (1 + self.depth(row.path))}{row.name or 'functional'}", row.total) for row in self]
        width = max(len(name) for name, _ in named)
        lines = [f"{name:<{width}}  {p.trace!s:>24}  {float(p.share):>8.1%}  {p.frobenius!s:>24}" for name, p in named]
        head = f"{'':<{width}}  {'trace':>24}  {'share':>8}  {'Frobenius norm':>24}"
        return "\n".join([head, *lines])


def sum_tolerance(dtype: torch.dtype) -> float:
    """How far terms may be from adding up by rounding, as a share of the sum of their sizes."""
    return min(max(1e4 * torch.finfo(dtype).eps, 1e-9), 0.05)


def above(path: str) -> list[str]:
    """The paths above a path, the model's first.

    >>> above("h.0.attn")
    ['', 'h', 'h.0']
    """
    words = path.split(".") if path else []
    return [".".join(words[:i]) for i in range(len(words))]
