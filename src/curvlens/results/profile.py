"""The curvature of a model by module, as a tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from curvlens.errors import CurvlensError, nearest, printable
from curvlens.results.base import Provenance, Result
from curvlens.results.by_block import ByBlock
from curvlens.results.estimate import Estimate, table_of
from curvlens.results.status import Status, worst

DIGITS = {"trace": 4, "share": 4, "frobenius": 4, "top": 3, "spectral": 4}
"""The quantities of a term, and the digits that a table shows if the error is smaller."""
COLUMNS = {
    "trace": ("trace", 1.0),
    "share": ("share, %", 100.0),
    "frobenius": ("Frobenius norm", 1.0),
    "top": ("of λ_max", 1.0),
    "spectral": ("‖·‖₂", 1.0),
}
"""The headings of a text table, with units."""
OWN = "(own code)"
"""The label of a module's own code, without the modules that it calls."""


@dataclass(frozen=True, eq=False)
class Portion(Result):
    """The known quantities of one symmetric term M of H = G + Σ M."""

    trace: Estimate
    """tr M; the traces of all terms add up to tr H."""
    frobenius: Estimate
    """‖M‖_F. Norms do not add up."""
    share: Estimate
    """⟨M, H⟩/‖H‖²_F; the shares of all terms add up to 1, and may be negative."""
    top: Estimate | None = None
    """uᵀ M u for the eigenvector u of the largest eigenvalue of H; these add up to the eigenvalue."""
    spectral: Estimate | None = None
    """‖M‖₂, if it was asked for."""

    @property
    def status(self) -> Status:
        """The worst status of its numbers."""
        return worst(estimate.status for estimate in self._known().values())

    def table(self) -> list[dict[str, Any]]:
        """A record for each quantity that is known: value, stderr, low and high ends of the 95 % interval."""
        return table_of(self._known())

    def _known(self) -> dict[str, Estimate]:
        return {name: getattr(self, name) for name in DIGITS if getattr(self, name) is not None}

    def _pictured(self) -> ByBlock:
        return ByBlock(self._known(), "size")

    @property
    def is_zero(self) -> bool:
        """Whether the term is zero: no probe saw anything."""
        return self.trace.exact and float(self.frobenius) == 0.0

    def flat(self) -> dict[str, float | None]:
        """Each number and its error by name: ``trace``, ``trace_error``, …; None if unknown."""
        found: dict[str, float | None] = {}
        for name in DIGITS:
            estimate = getattr(self, name)
            pair = (math.nan, math.nan) if estimate is None else (float(estimate), float(estimate.stderr))
            found[name], found[f"{name}_error"] = (x if math.isfinite(x) else None for x in pair)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Row(Result):
    """A module, or a step of attention: its functional part, in total and of its own code."""

    path: str
    kind: str
    """The class of the module, or scores, softmax, mix."""
    own: Portion
    """The part of its own code, without the modules inside it."""
    total: Portion
    """The part of the module with all modules inside it."""

    @property
    def status(self) -> Status:
        """The worse status of both portions."""
        return worst([self.own.status, self.total.status])

    def table(self) -> list[dict[str, Any]]:
        """A record for each quantity, for its own code and in total."""
        parts = {"own": self.own, "total": self.total}
        return [{"of": name, **record} for name, portion in parts.items() for record in portion.table()]

    def _pictured(self) -> ByBlock:
        both = {f"{of}.{name}": x for of in ("own", "total") for name, x in getattr(self, of)._known().items()}
        return ByBlock(both, "size")

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    def __repr__(self) -> str:
        return printable(f"Row({self.path!r}, {self.kind}, own trace {self.own.trace}, total trace {self.total.trace})")


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Result):
    """H = GGN + Σ_m M_m, term by term: ``profile["h.0.attn"].total.trace`` ± its error.

    Only traces, shares and contributions to the largest eigenvalue add up. Norms are those of each term alone.
    """

    hessian: Portion
    ggn: Portion
    rows: dict[str, Row]
    """By path; each module comes before the modules inside it. The first, "", is the model."""
    mismatch: float
    """The difference between the sum of all terms and an independently computed zᵀHz: the largest over all probes,
    relative to the sum of the terms' sizes."""
    samples: int
    note: str = ""
    provenance: Provenance = field(default_factory=dict)
    status: Status = Status.SAMPLED
    """How it ended."""

    def __getitem__(self, path: str) -> Row:
        if path not in self.rows:
            raise CurvlensError(f"The profile has no module {path!r}. {nearest(path, self.rows)}")
        return self.rows[path]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def children(self, path: str = "") -> list[Row]:
        """The rows directly below a path."""
        return self.tree()[self[path].path]

    def tree(self) -> dict[str, list[Row]]:
        """The rows directly below every path, in the order of the model."""
        below: dict[str, list[Row]] = {path: [] for path in self.rows}
        for row in self:
            parent = next((p for p in reversed(above(row.path)) if p in below), None)
            if parent is not None:
                below[parent].append(row)
        return below

    def table(self) -> list[dict[str, Any]]:
        """A flat record for each row, Hessian and GGN first: path, kind, ``own_trace``, ``own_trace_error``, ….

        ``pandas.DataFrame(profile.table())`` reads it. The path of the model is "". Unknown values are None.
        """
        records: list[dict[str, Any]] = [
            {"path": name, "kind": "", **_named("own", whole), **_named("total", whole)}
            for name, whole in (("Hessian", self.hessian), ("GGN", self.ggn))
        ]
        return records + [
            {"path": row.path, "kind": row.kind, **_named("own", row.own), **_named("total", row.total)} for row in self
        ]

    @property
    def adds_up(self) -> bool:
        """Whether the terms add up to the Hessian up to rounding; False if there are gaps."""
        return bool(self.mismatch <= sum_tolerance(getattr(torch, self.provenance.get("dtype", "float64"))))

    def depth(self, path: str) -> int:
        """The number of rows above a path."""
        return sum(p in self.rows for p in above(path))

    @property
    def headline(self) -> str:
        """A line on what was profiled."""
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
        """A line on the comparison with zᵀHz."""
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
        """The tree as a table, with the headline above and the check below."""
        named = [("Hessian", self.hessian), ("  GGN", self.ggn), *self._lines("", 1, self.tree())]
        columns = [["", *(printable(name) for name, _ in named)]]
        columns[0] = [name.ljust(max(map(len, columns[0]))) for name in columns[0]]
        for name, (heading, factor) in COLUMNS.items():
            cells = [getattr(portion, name) for _, portion in named]
            if any(cell is not None for cell in cells):
                pairs = [("", "") if cell is None else cell.short(factor, DIGITS[name]) for cell in cells]
                texts = aligned(pairs, len(heading))
                columns.append([heading.rjust(len(texts[0])), *texts])
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        note = [f"note: {printable(self.note)}"] if self.note else []
        return "\n".join([printable(self.headline), *lines, self.check, *note])

    def _lines(self, path: str, level: int, below: dict[str, list[Row]]) -> Iterator[tuple[str, Portion]]:
        row, lead = self.rows[path], "  " * level
        yield lead + (row.name or "functional"), row.total
        for child in below[path]:
            yield from self._lines(child.path, level + 1, below)
        if below[path] and not row.own.is_zero:
            yield f"{lead}  {OWN}", row.own


def _named(whose: str, portion: Portion) -> dict[str, float | None]:
    return {f"{whose}_{name}": value for name, value in portion.flat().items()}


def aligned(pairs: list[tuple[str, str]], least: int = 0) -> list[str]:
    """Values and errors aligned in a column; all texts have the same length, at least ``least``.

    >>> aligned([("1.5", "0.2"), ("23", "")])
    ['1.5 ± 0.2', ' 23      ']
    """
    errors = max((len(error) for _, error in pairs), default=0)
    wide = max([least - (3 + errors if errors else 0), *(len(value) for value, _ in pairs)])
    return [
        value.rjust(wide) + (f" ± {error:<{errors}}" if error else " " * (3 + errors) if errors else "")
        for value, error in pairs
    ]


def sum_tolerance(dtype: torch.dtype) -> float:
    """The largest difference of the sum that rounding explains, relative to the sum of the terms' sizes."""
    return min(max(1e4 * torch.finfo(dtype).eps, 1e-9), 0.05)


def above(path: str) -> list[str]:
    """The paths above a path, starting with the model.

    >>> above("h.0.attn")
    ['', 'h', 'h.0']
    """
    words = path.split(".") if path else []
    return [".".join(words[:i]) for i in range(len(words))]
