"""Laws fitted to tables of trained models: powers, the loss law of model and data size, and what curvature adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlens.errors import CurvlensError, printable
from curvlens.results.base import Provenance, Result
from curvlens.results.status import Status

Interval = tuple[float, float]


@dataclass(frozen=True, eq=False, repr=False)
class Power(Result):
    """y = a x^b, fitted on logarithms; intervals over seeds, or from the scatter about the line of a single one."""

    quantity: str
    over: str
    exponent: float
    interval: Interval
    log_prefactor: float
    """log a, which is a number also where a is beyond float64."""
    prefactor_interval: Interval
    seeds: list[Any]
    """The label of each seed that is part of the law: numbers or texts."""
    exponents: Tensor
    """(seeds,) of each by itself."""
    x: Tensor
    """(points,)"""
    y: Tensor
    """(seeds, points)"""
    low: Tensor
    """(points,) the ends of the interval of the law at each x."""
    high: Tensor
    level: float
    status: Status = Status.COMPLETE
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.y.shape != (len(self.exponents), len(self.x)) or not len(self.x) == len(self.low) == len(self.high):
            raise TypeError(f"y has shape {tuple(self.y.shape)}")
        if len(self.seeds) != len(self.exponents):
            raise TypeError(f"it has {len(self.seeds)} seeds and {len(self.exponents)} exponents")
        for name in ("interval", "prefactor_interval"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def prefactor(self) -> float:
        """a: infinite or 0 where float64 ends."""
        return _exp(self.log_prefactor)

    def __call__(self, x: float) -> float:
        """The fitted y: infinite or 0 where float64 ends."""
        if not x > 0:
            raise CurvlensError(f"x={x!r} has no logarithm. Give a number above 0.")
        return _exp(self.log_prefactor + self.exponent * math.log(x))

    def table(self) -> list[dict[str, Any]]:
        """A record for each x and seed: x is ``over``, y the ``quantity``, with the law and its interval there."""
        return [
            {"x": x, "y": y, "seed": seed, "law": self(x), "low": low, "high": high}
            for seed, line in zip(self.seeds, self.y.tolist(), strict=True)
            for x, y, low, high in zip(self.x.tolist(), line, self.low.tolist(), self.high.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        low, high = self.interval
        seeds, x = len(self.seeds), self.x.tolist()
        known = 0 < self.prefactor < math.inf
        prefactor = f"{self.prefactor:.4g}" if known else f"exp({self.log_prefactor:.6g})"
        note = f"; {self.note}" if self.note else ""
        return printable(
            f"{self.quantity} = {prefactor} {self.over}^{self.exponent:.3g} ({low:.3g} to {high:.3g} at "
            f"{self.level:.0%}, {seeds} seed{'s' * (seeds != 1)}, {self.over} {x[0]:g} to {x[-1]:g}{note})"
        )


def _exp(x: float) -> float:
    """exp x, infinite or 0 where float64 ends."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, eq=False, repr=False)
class LossLaw(Result):
    """L(N, D) = E + A/N^alpha + B/D^beta, with bootstrap intervals."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    intervals: dict[str, Any]
    """By name, (low, high) each."""
    residual: float
    """Root mean square of log L − log of the law."""
    N: Tensor
    """(rows,) parameters"""
    D: Tensor
    """(rows,) samples"""
    loss: Tensor
    """(rows,) L as measured."""
    level: float
    at_bounds: list[str] = field(default_factory=list)
    """Numbers that the data do not determine: their best values are at the ends of what was tried."""
    status: Status = Status.COMPLETE
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.N.shape == self.D.shape == self.loss.shape:
            raise TypeError("N, D and loss are not columns of one table")
        object.__setattr__(self, "intervals", {name: tuple(ends) for name, ends in self.intervals.items()})

    @property
    def settings(self) -> int:
        """How many different (N, D) there are."""
        return len(set(zip(self.N.tolist(), self.D.tolist(), strict=True)))

    def __call__(self, N: float, D: float) -> float:
        """The loss of a model with N parameters trained on D samples."""
        if not (N > 0 and D > 0):
            raise CurvlensError(f"N={N!r}, D={D!r}: the law is for numbers above 0.")
        return self.E + self.A * _exp(-self.alpha * math.log(N)) + self.B * _exp(-self.beta * math.log(D))

    def table(self) -> list[dict[str, Any]]:
        """A record for each trained model: N, D, its loss and that of the law."""
        rows = zip(self.N.tolist(), self.D.tolist(), self.loss.tolist(), strict=True)
        return [{"parameters": N, "samples": D, "loss": loss, "law": self(N, D)} for N, D, loss in rows]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name):.3g} ({low:.3g} to {high:.3g})"
            for name, (low, high) in self.intervals.items()
        )
        bound = f"; not determined: {', '.join(self.at_bounds)}" if self.at_bounds else ""
        return printable(
            f"L = E + A/N^alpha + B/D^beta: {parts} at {self.level:.0%}; residuals {self.residual:.2g} of log L, "
            f"{self.settings} settings{bound}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Gain(Result):
    """How well losses of left-out settings are predicted by the loss law alone, and with curvature beside it."""

    curvature: list[str]
    without: Tensor
    """(settings,) mean |log L − prediction| over the models of a left-out setting, by the law alone."""
    with_curvature: Tensor
    """(settings,)"""
    N: Tensor
    """(settings,) parameters"""
    D: Tensor
    """(settings,) samples"""
    difference: float
    """How much smaller the mean error is with curvature; negative if it is larger."""
    interval: Interval
    """Of the difference, paired over the settings. Their fits share data, so that it is somewhat narrow."""
    level: float
    status: Status = Status.COMPLETE
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.N.shape == self.D.shape == self.without.shape == self.with_curvature.shape:
            raise TypeError("its columns are not those of one table")
        object.__setattr__(self, "interval", tuple(self.interval))

    def table(self) -> list[dict[str, Any]]:
        """A record for each left-out setting: N, D and both errors of log L."""
        columns = (self.N, self.D, self.without, self.with_curvature)
        names = ("parameters", "samples", "without", "with_curvature")
        return [dict(zip(names, row, strict=True)) for row in zip(*(x.tolist() for x in columns), strict=True)]

    def __repr__(self) -> str:
        low, high = self.interval
        return printable(
            f"out of sample, log loss is missed by {float(self.without.mean()):.3g} with the loss law alone and by "
            f"{float(self.with_curvature.mean()):.3g} with {' and '.join(self.curvature)}: {self.difference:.3g} less "
            f"({low:.3g} to {high:.3g} at {self.level:.0%}, {len(self.without)} settings left out in turn)"
        )
