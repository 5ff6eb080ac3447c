"""An estimated number, or one for each entry of a tensor, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import scipy.stats
from torch import Tensor

from curvlens.blocks import Block, By
from curvlens.errors import CurvlensError, listing
from curvlens.results.base import Provenance, Result, require_tensors


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Result):
    """``value ± stderr`` in float64; the error is 0, with infinitely many degrees of freedom, where it is exact.

    >>> estimate = trace(torch.eye(3, dtype=torch.float64))
    >>> float(estimate), estimate.exact
    (3.0, True)
    """

    value: Tensor
    stderr: Tensor
    samples: int
    """Operator products spent."""
    dof: float = math.inf
    """Degrees of freedom of the standard error."""
    note: str = ""
    """What a reader has to know: interrupted, accuracy not reached."""
    provenance: Provenance = field(default_factory=dict)
    positive: bool = False
    """Whether it is a norm, or a trace from squares, of which the logarithm, not the number itself, is spread evenly
    around its mean."""
    fixed: float = 0.0
    """The part of the square of a norm that was computed, not sampled: the logarithm is that of the rest."""

    def __post_init__(self) -> None:
        require_tensors(self, "value", "stderr")

    @property
    def exact(self) -> bool:
        """Whether nothing was sampled."""
        return math.isinf(self.dof)

    def interval(self, level: float = 0.95) -> tuple[float, float] | tuple[Tensor, Tensor]:
        """The confidence interval by Student's t: two numbers, or two tensors; of a norm, on the logarithm.

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
        half = self.stderr * float(scipy.stats.t.ppf((1 + level) / 2, self.dof))
        if not self.positive or not bool((self.value > 0).all()):
            return self.value - half, self.value + half
        factor = (half / self.value).exp()
        low, high = self.value / factor, self.value * factor
        rest = self.value.square() - self.fixed
        if self.fixed and bool((rest > ROUNDING * self.value.square()).all()):
            factor = (2 * self.value * half / rest).exp()
            low = low.minimum((self.fixed + rest / factor).sqrt())
            high = high.maximum((self.fixed + rest * factor).sqrt())
        return low, high

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
            return "not known"
        if self.exact:
            return f"{float(self.value):.6g} (exact)"
        if math.isinf(float(self.stderr)):
            return f"{float(self.value):.4g} (one probe: error unknown)"
        return with_error(float(self.value), float(self.stderr))

    def short(self, factor: float = 1.0, digits: int = 4) -> tuple[str, str]:
        """Value and error as texts for a table; no error where it is too small to be seen in so many digits.

        >>> estimate = Estimate(torch.tensor(0.3512), torch.tensor(0.0234), 4, dof=3)
        >>> estimate.short(), estimate.short(100)
        (('0.351', '0.023'), ('35.1', '2.3'))
        """
        value, error = factor * float(self), factor * float(self.stderr)
        if math.isnan(value):
            return "not known", ""
        if not error > 0.5 * 10.0 ** (1 - digits) * abs(value) or not math.isfinite(error):
            return _plain(value, digits), ""
        said, _, spread = with_error(value, error).partition(" ± ")
        return said, spread

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        note = f", {self.note}" if self.note else ""
        return f"Estimate({self}, {self.samples} products{note})"

    def _repr_html_(self) -> str:
        import html

        return f"<code>{html.escape(repr(self))}</code>"


ROUNDING = 1e-10
"""A sampled part of a square below this share is rounding."""
SMALL = -3
"""The power of ten below which numbers are written with one."""


def with_error(value: float, error: float) -> str:
    """``12.34 ± 0.05``: as many digits as the error, with two of its own, leaves; of many, nine.

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
    """A number in so many digits.

    >>> _plain(0.5, 3), _plain(0.00021, 3), _plain(1234.5, 4), _plain(0.0, 3)
    ('0.500', '2.10e-04', '1234', '0')
    """
    if not value:
        return "0"
    if abs(value) < 10.0**SMALL:
        return f"{value:.{digits - 1}e}"
    return f"{value:#.{digits}g}".rstrip(".")


def check_level(level: float) -> None:
    """A confidence level is a probability."""
    if not 0 < level < 1:
        raise CurvlensError(f"level={level}, expected a probability between 0 and 1, as in interval(0.95).")


class ByBlock(Result, Mapping[str, Estimate]):
    """One estimate for each block, by name: a mapping that prints as a table."""

    def __init__(self, blocks: Mapping[str, Estimate], what: str = "estimate", by: By = "block") -> None:
        if not all(isinstance(block, Estimate) for block in blocks.values()):
            raise TypeError("every block has to be an Estimate")
        self._blocks = dict(blocks)
        self.what = what
        self.by = by
        """What there is one estimate for: a block, layer, role, head or parameter."""

    def __getitem__(self, name: str) -> Estimate:
        if name not in self._blocks:
            raise KeyError(f"The {self.what} by {self.by} has no {name!r}. {self._hint(str(name))}")
        return self._blocks[name]

    def _hint(self, name: str) -> str:
        """The granularity in which a name is likely to be found, or names that are here."""
        other: By | None = None
        if Block(f"{name}.x", ()).layer == name:
            other = "layer"
        elif any(known.endswith(f".{name}") for known in self):
            other = "role"
        elif name.rpartition(".")[0] in self and name.rpartition(".")[2].isdigit():
            other = "head"
        elif Block(name, ()).layer is not None:
            other = "block"
        asked = f"It may be in that with by={other!r}. " if other is not None and other != self.by else ""
        return f"{asked}Names here: {listing(self)}."

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        width = max((len(name) for name in self), default=0)
        lines = [f"  {name:<{width}}  {estimate}" for name, estimate in self.items()]
        return "\n".join([f"{self.what} by {self.by} ({len(self)})", *lines])

    def to_dict(self) -> dict[str, Any]:
        """By name, plain numbers."""
        return {name: estimate.to_dict() for name, estimate in self.items()}

    def _fields(self) -> dict[str, Any]:
        return {"blocks": self._blocks, "what": self.what, "by": self.by}
