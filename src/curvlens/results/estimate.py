"""An estimated number, or one for each entry of a tensor, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind, printable
from curvlens.results import arithmetic
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Result):
    """``value ± stderr`` in float64. If it is exact, the error is 0 and ``dof`` infinite.

    >>> estimate = trace(torch.eye(3, dtype=torch.float64))
    >>> float(estimate), estimate.exact
    (3.0, True)
    """

    value: Tensor
    stderr: Tensor
    samples: int
    """The number of operator products."""
    dof: float = math.inf
    """Degrees of freedom of the standard error."""
    note: str = ""
    """A remark for the reader: interrupted, accuracy not reached."""
    provenance: Provenance = field(default_factory=dict)
    positive: bool = False
    """Whether it is a norm, a trace from squares, or a multiple of one. Then the logarithm of its size, not the number
    itself, has a symmetric distribution."""
    fixed: float = 0.0
    """The exact part of the square of a norm. The logarithm is then that of the rest."""
    status: Status = Status.SAMPLED
    """How the sampling ended; ``EXACT`` if nothing was left to sample."""

    def __post_init__(self) -> None:
        require_tensors(self, "value", "stderr")
        if self.exact and self.status.ok:
            object.__setattr__(self, "status", Status.EXACT)

    @property
    def exact(self) -> bool:
        """Whether nothing was sampled."""
        return math.isinf(self.dof)

    @property
    def measured(self) -> bool:
        """Whether there is a number; False if work ended before it was measured."""
        return self.status is not Status.NOT_MEASURED

    def interval(self, level: float = 0.95) -> tuple[float, float] | tuple[Tensor, Tensor]:
        """The confidence interval by Student's t, as two numbers or two tensors; for a norm, on the logarithm.

        >>> Estimate(torch.tensor(2.0), torch.tensor(0.0), 3).interval()
        (2.0, 2.0)
        """
        low, high = self._ends(level)
        return (low, high) if self.value.ndim else (float(low), float(high))

    def half_width(self, level: float = 0.95) -> Tensor:
        """Half the length of the interval."""
        low, high = self._ends(level)
        return (high - low) / 2

    def _ends(self, level: float) -> tuple[Tensor, Tensor]:
        check_level(level)
        if self.exact:
            return self.value, self.value
        half = self.stderr * float(special.stdtrit(self.dof, (1 + level) / 2))
        size = self.value.abs()
        if not self.positive or not bool((size > 0).all()):
            return self.value - half, self.value + half
        factor = (half / size).exp()
        low, high = size / factor, size * factor
        rest = size.square() - self.fixed
        if self.fixed and bool((rest > ROUNDING * size.square()).all()):
            factor = (2 * size * half / rest).exp()
            low = low.minimum((self.fixed + rest / factor).sqrt())
            high = high.maximum((self.fixed + rest * factor).sqrt())
        negative = self.value < 0
        return torch.where(negative, -high, low), torch.where(negative, -low, high)

    def table(self) -> list[dict[str, Any]]:
        """A record for each number: value, stderr, low and high ends of the 95 % interval."""
        low, high = self._ends(0.95)
        columns = (x.reshape(-1).tolist() for x in (self.value, self.stderr, low, high))
        return [dict(zip(("value", "stderr", "low", "high"), row, strict=True)) for row in zip(*columns, strict=True)]

    def __float__(self) -> float:
        if self.value.ndim:
            raise CurvlensError(f"The estimate has shape {tuple(self.value.shape)}; only a single one is a number.")
        return float(self.value)

    def __str__(self) -> str:
        """``12.34 ± 0.05``, or the shape of a tensor of estimates."""
        if self.value.ndim:
            worst = float(self.stderr.max()) if self.stderr.numel() else 0.0
            return f"{tuple(self.value.shape)} numbers, standard errors up to {worst:.2g}"
        if math.isnan(float(self.value)):
            return "not known" if self.measured else "not measured"
        if self.exact:
            return f"{float(self.value):.6g} (exact)"
        if math.isinf(float(self.stderr)):
            return f"{float(self.value):.4g} (one probe: error unknown)"
        return with_error(float(self.value), float(self.stderr))

    def short(self, factor: float = 1.0, digits: int = 4) -> tuple[str, str]:
        """Value and error as texts for a table; no error if it is too small to show in so many digits.

        >>> estimate = Estimate(torch.tensor(0.3512), torch.tensor(0.0234), 4, dof=3)
        >>> estimate.short(), estimate.short(100)
        (('0.351', '0.023'), ('35.1', '2.3'))
        """
        value, error = factor * float(self), factor * float(self.stderr)
        if math.isnan(value):
            return "not known" if self.measured else "not measured", ""
        if not error > 0.5 * 10.0 ** (1 - digits) * abs(value) or not math.isfinite(error):
            return _plain(value, digits), ""
        said, _, spread = with_error(value, error).partition(" ± ")
        return said, spread

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        note = f", {self.note}" if self.note else ""
        return printable(f"Estimate({self}, {self.samples} {self.provenance.get('samples', 'products')}{note})")

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    # Arithmetic: `curvlens.results.arithmetic` explains the errors

    def __add__(self, other: Any) -> Estimate:
        """Errors add as squares if the estimates are independent (no common seed). Otherwise they are summed."""
        if isinstance(other, Estimate):
            return arithmetic.added(self, other)
        return arithmetic.shifted(self, _number(other, "+"))

    __radd__ = __add__

    def __neg__(self) -> Estimate:
        return arithmetic.scaled(self, -1.0)

    def __sub__(self, other: Any) -> Estimate:
        return self + (-other if isinstance(other, Estimate) else -_number(other, "-"))

    def __rsub__(self, other: Any) -> Estimate:
        return (-self).__add__(other)

    def __mul__(self, factor: Any) -> Estimate:
        return arithmetic.scaled(self, _number(factor, "*"))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Estimate:
        number = _number(divisor, "/")
        if not number:
            raise CurvlensError("An estimate was divided by 0.")
        return arithmetic.scaled(self, 1 / number)


def _number(value: Any, sign: str) -> float:
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return float(value)
    raise CurvlensError(
        f"An estimate {sign} {a_kind(value)}: estimates are added and subtracted, and multiplied by numbers. "
        "float(estimate) is the number without its error."
    )


def table_of(estimates: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """A record for each of several single numbers, by name; None for unknown values.

    >>> table_of({"a": Estimate(torch.tensor(2.0), torch.tensor(0.0), 3)})
    [{'quantity': 'a', 'value': 2.0, 'stderr': 0.0, 'low': 2.0, 'high': 2.0}]
    """
    rows = ((name, record) for name, estimate in estimates.items() for record in estimate.table())
    return [{"quantity": name, **{k: x if math.isfinite(x) else None for k, x in row.items()}} for name, row in rows]


def not_measured() -> Estimate:
    """A placeholder for a number that was not measured: NaN. Anything computed from it is NaN too."""
    unknown = torch.tensor(math.nan, dtype=torch.float64)
    return Estimate(unknown, unknown.clone(), 0, 1.0, "not measured", status=Status.NOT_MEASURED)


ROUNDING = 1e-10
"""If the sampled part of a square is below this share, it is rounding."""
SMALL = -3
"""Numbers below this power of ten are written with an exponent."""


def with_error(value: float, error: float) -> str:
    """``12.34 ± 0.05``: the error has two digits, the value as many decimals as the error; at most nine digits.

    >>> with_error(22.5139, 0.5), with_error(2.05e-7, 2e-8), with_error(3e-6, 7e-5), with_error(-0.001, 0.2)
    ('22.51 ± 0.50', '2.05e-07 ± 0.20e-07', '0.3e-05 ± 7.0e-05', '0.00 ± 0.20')
    >>> with_error(259.450483, 7e-13), with_error(0.62640191441, 7.8e-10)
    ('259.450483 ± 7e-13', '0.626401914 ± 8e-10')
    """
    if not (error > 0 and math.isfinite(error) and math.isfinite(value)):
        return f"{value:.6g} ± {error:.2g}"
    top = math.floor(math.log10(max(abs(value), error)))
    places = 1 - math.floor(math.log10(error))
    if top + places > 7:
        return f"{value:.9g} ± {error:.0e}"
    if SMALL <= top < 6:
        return f"{value:z.{max(places, 0)}f} ± {error:.{max(places, 0)}f}"
    unit, digits = 10.0**top, max(places + top, 0)
    return f"{value / unit:z.{digits}f}e{top:+03d} ± {error / unit:.{digits}f}e{top:+03d}"


def _plain(value: float, digits: int) -> str:
    """A number with this many digits.

    >>> _plain(0.5, 3), _plain(0.00021, 3), _plain(1234.5, 4), _plain(0.0, 3)
    ('0.500', '2.10e-04', '1234', '0')
    """
    if not value:
        return "0"
    if abs(value) < 10.0**SMALL:
        return f"{value:.{digits - 1}e}"
    return f"{value:#.{digits}g}".rstrip(".")


def check_level(level: float) -> None:
    """Check that a confidence level is a probability."""
    if not isinstance(level, Real) or not 0 < level < 1:
        raise CurvlensError(f"level={level!r}, expected a probability between 0 and 1, as in interval(0.95).")
