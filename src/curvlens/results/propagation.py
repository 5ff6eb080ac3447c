"""The curvature at each layer of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from curvlens.errors import CurvlensError, nearest, printable
from curvlens.results.base import Provenance, Result
from curvlens.results.by_block import ByBlock
from curvlens.results.estimate import Estimate, table_of
from curvlens.results.status import Status, worst

PARTS = ("hessian", "ggn", "functional")
QUANTITIES = ("trace", "frobenius", "top", "bottom")
COLUMNS = {"λ_min": 19, "λ_max": 19, "norm": 19, "trace": 19}
"""The columns of a printed table, with their widths."""


@dataclass(frozen=True, eq=False)
class Amount(Result):
    """The size of one symmetric matrix."""

    trace: Estimate
    frobenius: Estimate
    """Never below ‖M‖₂: the eigenvalues at the ends are computed, and only the rest is sampled."""
    top: Estimate
    """The largest eigenvalue. The error is a bound: an eigenvalue lies within it."""
    bottom: Estimate | None = None
    """The smallest eigenvalue, with the same kind of error; None if the matrix has no negative eigenvalue."""

    @property
    def status(self) -> Status:
        """The worst status of its numbers."""
        return worst(estimate.status for estimate in self._known().values())

    def table(self) -> list[dict[str, Any]]:
        """A record for each quantity that is known: value, stderr, low and high ends of the 95 % interval."""
        return table_of(self._known())

    def _known(self) -> dict[str, Estimate]:
        return {name: getattr(self, name) for name in QUANTITIES if getattr(self, name) is not None}

    def _pictured(self) -> ByBlock:
        return ByBlock(self._known(), "size")

    @property
    def spectral(self) -> Estimate:
        """‖M‖₂, the larger of |λ_min| and |λ_max|."""
        ends = [end for end in (self.bottom, self.top) if end is not None]
        largest = max(ends, key=lambda end: abs(float(end)))
        return replace(largest, value=largest.value.abs())


class Amounts(dict[str, Amount]):
    """Amounts by part. A missing name raises an error with the nearest known name."""

    def __missing__(self, name: str) -> Amount:
        if not self:
            raise CurvlensError(f"There is no {name!r} of activations: a role has parameters only.")
        raise CurvlensError(f"There is no part {name!r}. {nearest(str(name), self)}")


@dataclass(frozen=True, eq=False)
class Level(Result):
    """A layer, or a role over all layers: the curvature of H, G and F there."""

    name: str
    parameters: dict[str, Amount]
    """The block of its own parameters, by part: hessian, ggn, functional."""
    activations: dict[str, Amount]
    """The Hessian by the activations that leave it, which comes from all later layers. Empty for a role."""

    @property
    def status(self) -> Status:
        """The worst status of its amounts."""
        return worst(amount.status for amount in (*self.parameters.values(), *self.activations.values()))

    def table(self) -> list[dict[str, Any]]:
        """A record for each part, for parameters and for activations."""
        return self._pictured().table()

    def _pictured(self) -> Propagation:
        return Propagation({self.name: self}, "level", 0)

    def __post_init__(self) -> None:
        for name in ("parameters", "activations"):
            object.__setattr__(self, name, Amounts(getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class Propagation(Result):
    """The curvature of every layer, in the order of the model: ``propagation["h.0"].activations["ggn"].top``."""

    levels: dict[str, Level]
    by: str
    samples: int
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The worst status of its levels."""
        return worst(level.status for level in self.levels.values())

    def __getitem__(self, name: str) -> Level:
        if name not in self.levels:
            raise CurvlensError(f"There is no {self.by} {name!r}. {nearest(name, self.levels)}")
        return self.levels[name]

    def __len__(self) -> int:
        return len(self.levels)

    def table(self) -> list[dict[str, Any]]:
        """A record for each layer, part (hessian, ggn, functional) and side (parameters, activations)."""
        records = []
        for name, level in self.levels.items():
            for side in ("parameters", "activations"):
                for part, amount in getattr(level, side).items():
                    numbers: dict[str, Any] = {self.by: name, "of": side, "part": part}
                    for what in QUANTITIES:
                        estimate = getattr(amount, what)
                        numbers[what] = None if estimate is None else float(estimate)
                        numbers[f"{what}_error"] = None if estimate is None else float(estimate.stderr)
                    records.append(numbers)
        return records

    def __repr__(self) -> str:
        names = ", ".join(self.levels)
        return printable(f"Propagation({len(self)} by {self.by}: {names}; {self.samples} samples each)")

    def __str__(self) -> str:
        """Tables with both ends of the spectrum, norm and trace of every part, for parameters and activations."""
        width = max([2 + len(printable(name)) for name in self.levels] + [12])
        lines = []
        for what in ("parameters", "activations"):
            if not all(getattr(level, what) for level in self.levels.values()):
                continue
            lines.append(f"by {what}")
            for part in PARTS:
                lines.append(f"{part:<{width}}" + "".join(f" {head:>{size}}" for head, size in COLUMNS.items()))
                for name, level in self.levels.items():
                    lines.append(f"  {printable(name):<{width - 2}}" + _cells(getattr(level, what)[part]))
        return "\n".join(lines)


def _cells(amount: Amount) -> str:
    """The numbers of one row, without an error if it is too small to show."""
    shown = {"λ_min": "≥ 0" if amount.bottom is None else _text(amount.bottom), "λ_max": _text(amount.top)}
    shown |= {"norm": _text(amount.frobenius), "trace": _text(amount.trace)}
    return "".join(f" {shown[head]:>{size}}" for head, size in COLUMNS.items())


def _text(estimate: Estimate) -> str:
    return " ± ".join(filter(None, estimate.short()))
