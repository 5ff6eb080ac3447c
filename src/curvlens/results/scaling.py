"""Losses and curvature of many trained models: against their size, their data and their training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import CurvlensError, nearest, printable
from curvlens.results.base import Provenance, Result
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Scaling(Result):
    """A row for each setting and seed: `table`. The condition number is λ₁/λ_k of the Gauss–Newton matrix G, over its
    ``top`` largest eigenvalues without those below ``floor`` times the largest."""

    settings: dict[str, list[Any]]
    """The columns of the grid and the seed."""
    values: dict[str, Tensor]
    """(rows,) each: parameters, kept (the k of the condition number), train_loss, test_loss, gradient_norm, lambda_max,
    lambda_min, trace, frobenius, effective_rank (tr H)²/‖H‖²_F, condition, negative_mass (the share of negative
    eigenvalues). NaN where there is none: no test data, or a training that diverged."""
    errors: dict[str, Tensor]
    """(rows,) each: standard errors, residuals for eigenvalues, 0 for what is exact. That of ``negative_mass`` includes
    what the quadrature leaves undecided beside 0."""
    top: int
    floor: float
    left: int
    """Settings that were not measured because the budget was spent. The same call continues with them."""
    status: Status
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(column) for part in (self.settings, self.values, self.errors) for column in part.values()}
        if len(lengths) != 1 or "seed" not in self.settings:
            raise TypeError("its columns are not those of one table")

    def __len__(self) -> int:
        return len(self.settings["seed"])

    def table(self) -> list[dict[str, Any]]:
        """A record for each setting and seed: the setting, and each number with its error."""
        columns: dict[str, list[Any]] = dict(self.settings)
        for name, numbers in self.values.items():
            columns[name] = [_finite(x) for x in numbers.tolist()]
            if name in self.errors:
                columns[f"{name}_error"] = [_finite(x) for x in self.errors[name].tolist()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def column(self, name: str) -> list[Any]:
        """One column of the table: a setting or a number."""
        if name in self.settings:
            return list(self.settings[name])
        if name in self.values:
            return [_finite(x) for x in self.values[name].tolist()]
        raise CurvlensError(f"There is no column {name!r}. {nearest(name, [*self.settings, *self.values])}")

    def varying(self) -> list[str]:
        """The settings that have more than one value, without the seed."""
        return [name for name, x in self.settings.items() if name != "seed" and len(set(x)) > 1]

    def __repr__(self) -> str:
        over = ", ".join(
            f"{name} {min(x)} to {max(x)}" if all(isinstance(each, (int, float)) for each in x) else name
            for name, x in ((name, self.settings[name]) for name in self.varying())
        )
        seeds = len(set(self.settings["seed"]))
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"Scaling({len(self)} trained models, {seeds} seed{'s' * (seeds > 1)}{'; ' * bool(over)}{over}; condition "
            f"number of the top {self.top} of G{note})"
        )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
