"""A spectral density: the distribution of the eigenvalues, with total mass 1."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.results.base import Provenance, Result, require_tensors
from curvlens.results.estimate import Estimate, check_level
from curvlens.results.measure import Measure, wasserstein
from curvlens.results.status import Status


@dataclass(frozen=True, eq=False, repr=False)
class Density(Result):
    """The spectral measure μ = (1/n) Σ δ(λ_i): total mass 1, atoms at repeated or isolated eigenvalues.

    Each probe has nodes and weights; sums Σ w f(λ) are exact for polynomials (moments, traces of functions). ``lower``,
    ``upper`` and ``mass`` are the drawn measure: a node that is an eigenvalue is an atom; the mass of other nodes is
    spread evenly to their neighbours.
    """

    nodes: Tensor
    weights: Tensor
    probe: Tensor
    """The probe that a node belongs to."""
    settled: Tensor
    """Whether a node is an eigenvalue, to 1e-6 of the norm."""
    coarse_nodes: Tensor
    coarse_weights: Tensor
    """The weights after half of the steps. If a function changed by then, it may change as much again."""
    lower: Tensor
    upper: Tensor
    mass: Tensor
    n: int
    """The number of eigenvalues."""
    probes: int
    """0 if the spectrum was computed in full."""
    error: float
    """The 1-Wasserstein distance to the true measure is below this with 95 % confidence."""
    products: int
    provenance: Provenance = field(default_factory=dict)
    status: Status = Status.SAMPLED
    """How the computation ended; ``EXACT`` if the spectrum was computed in full."""
    note: str = ""
    """A remark for the reader, such as "interrupted after 2 of 4 probes"."""

    def __post_init__(self) -> None:
        require_tensors(
            self, "nodes", "weights", "probe", "settled", "coarse_nodes", "coarse_weights", "lower", "upper", "mass"
        )
        if self.exact and self.status.ok:
            object.__setattr__(self, "status", Status.EXACT)

    @property
    def exact(self) -> bool:
        """Whether the spectrum was computed in full."""
        return self.probes == 0

    @property
    def measure(self) -> Measure:
        """The drawn density as a measure."""
        return Measure(self.lower, self.upper, self.mass)

    def atoms(self, tolerance: float = 1e-6) -> list[tuple[float, float]]:
        """(value, mass) of isolated or repeated eigenvalues, ascending. n times the mass estimates the multiplicity.

        Values closer than ``tolerance`` times the largest count as one.
        """
        is_atom = self.lower == self.upper
        values, order = self.lower[is_atom].sort()
        masses = self.mass[is_atom][order]
        if not len(values):
            return []
        gap = tolerance * float(self.nodes.abs().max())
        group = torch.cat([torch.zeros(1, dtype=torch.long), (values.diff() > gap).cumsum(0)])
        total = torch.zeros(int(group[-1]) + 1, dtype=torch.float64).index_add_(0, group, masses)
        center = torch.zeros_like(total).index_add_(0, group, masses * values) / total.clamp(min=1e-300)
        return list(zip(center.tolist(), total.tolist(), strict=True))

    def cdf(self, x: Tensor) -> Tensor:
        """The share of eigenvalues up to x."""
        return self.measure.cdf(torch.as_tensor(x, dtype=torch.float64)).clamp(0, 1)

    def band(self, x: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """A pointwise confidence band of `cdf`, from the law of random directions and the resolution of the nodes."""
        check_level(level)
        x = torch.as_tensor(x, dtype=torch.float64)
        if self.exact:
            return self.cdf(x), self.cdf(x)
        low, high = (F.mean(0) for F in self._brackets(x))
        z = float(special.ndtri((1 + level) / 2))
        scale = math.sqrt(2 / ((self.n + 2) * self.probes))
        seen = 1 / (self.n * self.probes)
        low, high = (F + sign * z * scale * (F * (1 - F) + seen).sqrt() for F, sign in ((low, -1), (high, 1)))
        return low.clamp(min=0), high.clamp(max=1)

    def _brackets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest mass up to x that each probe's measure can have, (probes, points).

        The mass of a node lies between its neighbours (Chebyshev, Markov, Stieltjes); that of an eigenvalue is at it.
        """
        rounding = 1e-9 * float(self.nodes.abs().max())
        low, high = [], []
        for i in range(self.probes):
            own = self.probe == i
            theta, settled = self.nodes[own], self.settled[own]
            weights = self.weights[own] * self.probes
            last, first = theta[-1:] + rounding, theta[:1] - rounding
            right = torch.where(settled, theta + rounding, torch.cat([theta[1:], last]))
            left = torch.where(settled, theta - rounding, torch.cat([first, theta[:-1]]))
            low.append(Measure(right, right, weights).cdf(x).clamp(0, 1))
            high.append(Measure(left, left, weights).cdf(x).clamp(0, 1))
        return torch.stack(low), torch.stack(high)

    def curve(self, points: int = 200, width: float | None = None) -> tuple[Tensor, Tensor]:
        """(x, density at x), smoothed by a Gaussian of standard deviation ``width`` (1/100 of the range)."""
        span = self._span()
        width = span / 100 if width is None else width
        if not 0 < width < math.inf:
            raise CurvlensError(f"width={width}, expected a positive number.")
        if points < 2:
            raise CurvlensError(f"points={points}, expected 2 or more.")
        ends = float(self.lower.min()) - 3 * width, float(self.upper.max()) + 3 * width
        x = torch.linspace(*ends, points, dtype=torch.float64)
        edges = torch.stack([self.lower, self.upper])
        flat = (edges[1] - edges[0]) > 1e-9 * span
        z = (x[:, None, None] - edges) / width
        atoms = torch.exp(-z[:, 0].square() / 2) / (width * math.sqrt(2 * math.pi))
        ramps = (torch.special.ndtr(z[:, 0]) - torch.special.ndtr(z[:, 1])) / (edges[1] - edges[0]).clamp(min=1e-300)
        return x, torch.where(flat, ramps, atoms) @ self.mass

    def _span(self) -> float:
        span = float(self.upper.max() - self.lower.min())
        size = max(float(self.nodes.abs().max()), 1e-300)
        return span if span > 1e-9 * size else size

    # Numbers

    def function(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """(1/n) tr f(A) = Σ w f(λ): exact for polynomials of a degree below twice the number of steps.

        The error includes the spread of the probes, and the change of the value in the second half of the steps.
        """
        values = _applied(f, self.nodes)
        value = (self.weights * values).sum()
        if self.exact:
            return Estimate(value, torch.zeros_like(value), self.products, provenance=self.provenance)
        change = float((self.coarse_weights * _applied(f, self.coarse_nodes)).sum() - value)
        return self._over_probes(self._by_probe(values), change)

    def _by_probe(self, values: Tensor) -> Tensor:
        sums = torch.zeros(self.probes, dtype=torch.float64).index_add_(0, self.probe, self.weights * values)
        return sums * self.probes

    def _over_probes(self, x: Tensor, change: float) -> Estimate:
        if self.probes == 1:
            stderr, dof = torch.tensor(math.inf, dtype=torch.float64), 1.0
        else:
            stderr, dof = (x.var() / self.probes + change**2).sqrt(), float(self.probes - 1)
        return Estimate(x.mean(), stderr, self.products, dof, provenance=self.provenance)

    def moment(self, power: int) -> Estimate:
        """(1/n) Σ λ^power."""
        if not isinstance(power, int) or power < 0:
            raise CurvlensError(f"power={power!r}, expected a whole number, 0 or more.")
        return self.function(lambda x: x**power)

    def negative_mass(self) -> Estimate:
        """The share of negative eigenvalues, below 1e-10 of the largest.

        Quadrature resolves a step at 0 badly if many eigenvalues are near 0. The error includes all the mass that the
        nodes beside 0 leave undecided. More steps, or ``exact=True``, reduce it.
        """
        floor = -1e-10 * float(self.nodes.abs().max())
        if self.exact:
            return self.function(lambda x: (x < floor).double())
        low, high = self._brackets(torch.tensor([floor], dtype=torch.float64))
        middle = (low + high)[:, 0] / 2
        return self._over_probes(middle, float((high - low).mean()) / 2)

    def logdet(self, damping: float) -> Estimate:
        """log det (A + damping). The damping must make A + damping positive."""
        lowest = float(self.nodes.min())
        if not lowest + damping > 0:
            raise CurvlensError(
                f"A + {damping:g} is not positive: its smallest eigenvalue seen is {lowest + damping:.3g}. "
                f"Give a damping above {-lowest:.3g}."
            )
        mean = self.function(lambda x: (x + damping).log())
        return Estimate(mean.value * self.n, mean.stderr * self.n, self.products, mean.dof, provenance=self.provenance)

    def effective_rank(self) -> Estimate:
        """(tr A)² / ‖A‖²_F: the number of equal eigenvalues with this trace and norm."""
        square = self.moment(2).value
        if self.exact or not float(square):
            value = self.n * self.moment(1).value ** 2 / square if float(square) else torch.zeros_like(square)
            return Estimate(value, torch.zeros_like(value), self.products, provenance=self.provenance)
        first, second = self._by_probe(self.nodes), self._by_probe(self.nodes.square())
        value = self.n * first.mean() ** 2 / second.mean()
        if self.probes < 3:
            unknown = torch.tensor(math.inf, dtype=torch.float64)
            return Estimate(value, unknown, self.products, 1.0, provenance=self.provenance)
        count = self.probes
        left = (first.sum() - first) / (count - 1), (second.sum() - second) / (count - 1)
        each = self.n * left[0] ** 2 / left[1]
        stderr = ((each - each.mean()).square().sum() * (count - 1) / count).sqrt()
        return Estimate(value, stderr, self.products, float(count - 1), provenance=self.provenance)

    def distance(self, other: Density | Tensor | np.ndarray) -> float:
        """The 1-Wasserstein distance to another density, or to a list of eigenvalues: ∫ |F − G| dx."""
        if not isinstance(other, Density):
            values = torch.as_tensor(other, dtype=torch.float64).reshape(-1)
            if not len(values):
                raise CurvlensError("An empty list of eigenvalues has no distance to a density.")
            return wasserstein(self.measure, Measure(values, values, torch.full_like(values, 1 / len(values))))
        return wasserstein(self.measure, other.measure)

    # For people

    def table(self, points: int = 200) -> list[dict[str, Any]]:
        """The smoothed density, and the share of eigenvalues up to x with its 95 % band, at equally spaced x."""
        x, y = self.curve(points)
        low, high = self.band(x)
        columns = zip(x.tolist(), y.tolist(), self.cdf(x).tolist(), low.tolist(), high.tolist(), strict=True)
        return [dict(zip(("x", "density", "cumulative", "low", "high"), row, strict=True)) for row in columns]

    def __repr__(self) -> str:
        how = (
            "in full"
            if self.exact
            else f"from {self.probes} probe{'s' * (self.probes > 1)}, Wasserstein error {self.error:.2g}"
        )
        note = f", {self.note}" if self.note else ""
        low, high = float(self.nodes.min()), float(self.nodes.max())
        return f"Density({self.n} eigenvalues in [{low:.4g}, {high:.4g}], {how}, {self.products} products{note})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def text(self, width: int = 72, height: int = 12) -> str:
        """A drawing for the terminal: the share of eigenvalues in each bin, on a logarithmic scale."""
        if width < 10 or height < 1:
            raise CurvlensError(f"A drawing of {width} × {height} characters is too small: 10 × 1 at least.")
        low, high = float(self.lower.min()), float(self.upper.max())
        pad = 0.02 * self._span()
        edges = torch.linspace(low - pad, high + pad, width + 1, dtype=torch.float64)
        shares = self.cdf(edges).diff().clamp(min=0)
        floor = 0.02 / self.n  # shows a single eigenvalue even if its weight in the probes is small
        levels = torch.where(shares > floor, (shares / floor).log() / math.log(1 / floor) if floor < 1 else shares, 0.0)
        steps = (levels * height * 8).round().long()
        rows = []
        for row in range(height - 1, -1, -1):
            cells = (steps - 8 * row).clamp(0, 8).tolist()
            rows.append("".join(" ▁▂▃▄▅▆▇█"[cell] for cell in cells).rstrip())
        left, right = f"{low:.4g}", f"{high:.4g}"
        marks = [left, " " * max(width - len(left) - len(right), 1), right]
        zero = int((0 - float(edges[0])) / float(edges[-1] - edges[0]) * width)
        line = ["─"] * width
        if 0 <= zero < width:
            line[zero] = "┴"
        title = f"{self.n} eigenvalues, share in each bin (logarithmic)"
        return "\n".join([title[:width], *rows, "".join(line), "".join(marks)])


def _applied(f: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    """f of eigenvalues, checked."""
    values = f(nodes)
    if not isinstance(values, Tensor) or values.shape != nodes.shape:
        raise CurvlensError("f has to map a tensor of eigenvalues to a tensor of the same shape, entry by entry.")
    if not bool(torch.isfinite(values).all()):
        bad = nodes[~torch.isfinite(values)]
        raise CurvlensError(f"f is not finite at {len(bad)} of the eigenvalues, the first {float(bad[0]):g}.")
    return values
