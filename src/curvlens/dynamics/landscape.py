"""How does the loss landscape settle as data grow?

One more sample changes the mean loss by D_k/(k + 1), where D_k = l_{k+1} − L_k at every w. Around θ, with Δ for sample
k + 1 less the mean of the first k, D_k is Δl + Δgᵀδ + ½ δᵀΔH δ to second order. Its mean and second moment over a
sphere, a Gaussian or a subspace are known in closed form (`docs/explanation/math.md`, "Landscape").
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from curvlens.dynamics.per_sample import PerSample, losses, measured
from curvlens.dynamics.provenance import provenance
from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError, NonFiniteLossError
from curvlens.linalg.counted import whole
from curvlens.operators.base import Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import Estimate, Landscape, Status
from curvlens.surroundings import as_found

Around = Literal["sphere", "gaussian"]
AGREEMENT = 0.05
SMALLEST, LARGEST = 1e-50, 1e50
"""Radii: their fourth powers are numbers of float64."""
NOISE = 0.2
"""Of a second moment: twice its error, beyond which it cannot tell whether the quadratic model holds."""
EPS, ROUNDING = torch.finfo(torch.float64).eps, 64
"""Sums of so many units in the last place are taken for 0."""
GROUPS = 10
"""Groups of orders, for the errors of slopes."""
FEWEST = 16


@as_found
def landscape(
    problem: Problem,
    radii: float | Iterable[float] = (),
    *,
    around: Around = "sphere",
    basis: Tensor | None = None,
    within: str | Sequence[str] | None = None,
    ks: Iterable[int] | None = None,
    curvature: bool = True,
    orders: int = 200,
    points: int = 32,
    probes: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Landscape:
    """Increments and distances of the loss, gradient and Hessian of k samples, at θ and around it, as functions of k.

    Args:
        problem: its samples, one by one; θ need not be a minimum.
        radii: of the surroundings; for a Gaussian the standard deviation of each entry. None: only at θ.
        around: "sphere" or "gaussian".
        basis: orthonormal rows: the surroundings are then in their span, such as ``cl.eigs(H, 5).vectors.T``, and the
            moments are exact.
        within: a block such as "h.0.attn", a head, or several: the surroundings move these parameters alone, and
            gradients and Hessians are those of the block.
        ks: numbers of samples, below that of the data. Default: powers of 2 from 4 on.
        curvature: also gradients and Hessians. False needs one forward pass for each sample, and no surroundings.
        orders: random orders of the samples.
        points: random points around θ for each radius, with a forward pass over all samples each.
        probes: random probes for traces and norms of Hessians, with a product for each sample. Not used with a basis.
        seed: for orders, points and probes.
        progress: called as ``progress(done, total)`` after every sample of every pass.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> x, y = torch.ones(64, 1).double(), torch.arange(64, dtype=torch.float64)[:, None] % 4
    >>> result = landscape(Problem(model, (x, y), MSE()), curvature=False)
    >>> round(float(result.slopes["distance"]), 1)
    -0.5
    """
    require_problem(problem, "landscape")
    wanted = _radii(radii)
    if around not in get_args(Around):
        raise CurvlensError(f"around={around!r}, expected 'sphere' or 'gaussian'.")
    for name, value, least in (("orders", orders, 2 * GROUPS), ("points", points, 2), ("probes", probes, 2)):
        if not whole(value) or value < least:
            raise CurvlensError(f"{name}={value!r}, expected a whole number, {least} or more.")
    if wanted and not curvature:
        raise CurvlensError("Surroundings need gradients and Hessians. Give curvature=True, or no radii.")
    separated = Separated(problem, 1)
    n = separated.count
    if separated.name != "sample" or n < FEWEST:
        raise CurvlensError(
            f"A landscape needs {FEWEST} single samples at least; this data has {n} of one {separated.name} each. Give "
            "more samples, with a common first axis and a loss that does not couple them."
        )
    if basis is not None:
        _check_basis(basis, problem)
    if basis is not None and within is not None:
        raise CurvlensError("basis= and within= both say what is around θ. Give one of them.")
    mask = None if within is None else _mask(problem, within)
    sizes = _sizes(ks, n)
    done, planned = 0, n * (((len(basis) if basis is not None else probes) if curvature else 1) + points * len(wanted))

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, planned)

    if curvature:
        found = measured(separated, basis, probes, seed, tick, mask, errors=bool(wanted))
    else:
        found = PerSample(*losses(separated, tick))
    generator = torch.Generator().manual_seed(seed + 1)
    permutations = torch.stack([torch.randperm(n, generator=generator) for _ in range(orders)])
    table = _Orders(found, permutations, sizes)
    moments = [_closed(table, radius, around) for radius in wanted]
    around_it = [_sampled(problem, table, radius, around, basis, mask, points, generator, tick) for radius in wanted]
    empty = torch.zeros(0, len(sizes), dtype=torch.float64)

    def stacked(which: int, of: Sequence[tuple[Tensor, ...]]) -> Tensor:
        return torch.stack([each[which] for each in of]) if of else empty

    mean, second = stacked(0, moments), stacked(1, moments)
    probed = _probed(table, wanted, around, second) if basis is None else torch.zeros_like(second)
    true_mean, true_second, error = (stacked(i, around_it) for i in range(3))
    held, note = _holds(wanted, second, true_second, error, probed)
    return Landscape(
        k=torch.tensor(sizes),
        increment=table.increments.square().mean(0).sqrt(),
        distance=table.distances.square().mean(0).sqrt(),
        slopes=table.slopes(),
        samples=n,
        orders=orders,
        around="subspace" if basis is not None or within is not None else around,
        radii=torch.tensor(wanted, dtype=torch.float64),
        mean=mean,
        second=second,
        true_mean=true_mean,
        true_second=true_second,
        true_error=error,
        second_error=probed,
        bound=torch.stack([torch.stack(each[2:5]) for each in moments], 1) if moments else empty.expand(3, 0, -1),
        terms=torch.stack([torch.stack(each[5:]) for each in moments], 1) if moments else empty.expand(3, 0, -1),
        gradient_distance=table.far("gradients"),
        hessian_distance=table.far("hessians"),
        gradient_norm=_gradient_norm(problem, mask),
        holds=held,
        note=note,
        status=Status.SAMPLED,
        products=found.products,
        provenance=provenance(problem, seed=seed),
    )


class _Orders:
    """Weights of samples: of the next one less the mean of the first k, and of that mean less the mean of all."""

    def __init__(self, of: PerSample, permutations: Tensor, sizes: list[int]) -> None:
        self.of, self.sizes, self.permutations = of, sizes, permutations
        self.n = len(of.loss)
        c = of.count
        self.limit = c / c.sum()
        self.increments = self._each(lambda k: self.share(k) * self.linear(self.step(k)))
        self.distances = self._each(lambda k: self.linear(self.prefix(k) - self.limit) * self.correction(k))

    def of_others(self, of: PerSample) -> _Orders:
        """The same orders, of other estimates of the same samples."""
        other = copy.copy(self)
        other.of = of
        return other

    def _each(self, of: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([of(k) for k in self.sizes], 1)

    def correction(self, k: int) -> float:
        """1/√(1 − k/n): from the mean of these n samples to that of endless ones."""
        return 1 / math.sqrt(1 - k / self.n)

    def prefix(self, k: int) -> Tensor:
        """(orders, n): the mean of the first k samples, by their tokens."""
        chosen = self.permutations[:, :k]
        weights = torch.zeros(len(chosen), self.n, dtype=torch.float64)
        counts = self.of.count[chosen]
        return weights.scatter_(1, chosen, counts / counts.sum(1, keepdim=True).clamp(min=1e-300))

    def step(self, k: int) -> Tensor:
        """(orders, n): sample k + 1 less the mean of the first k."""
        weights = -self.prefix(k)
        return weights.scatter_(1, self.permutations[:, k : k + 1], 1.0)

    def share(self, k: int) -> Tensor:
        """(orders,): c_{k+1}/C_{k+1}."""
        counts = self.of.count[self.permutations[:, : k + 1]]
        return counts[:, k] / counts.sum(1).clamp(min=1e-300)

    def linear(self, weights: Tensor) -> Tensor:
        """(orders,): wᵀ l, and 0 where that is rounding."""
        found = weights @ self.of.loss
        return found.where(found.abs() > ROUNDING * EPS * float(self.of.loss.abs().max()), 0.0)

    def squares(self, which: str, weights: Tensor) -> Tensor:
        """(orders,): wᵀ M w, and 0 where that is rounding."""
        matrix: Tensor = getattr(self.of, which)
        found = ((weights @ matrix) * weights).sum(1)
        return found.where(found.abs() > ROUNDING * EPS * float(matrix.diagonal().abs().max()), 0.0)

    def far(self, which: str) -> Tensor:
        """(K,): RMS distance of the mean gradient or Hessian from that of all samples, corrected."""
        if self.of.gradients is None:
            return torch.zeros(0, dtype=torch.float64)
        return self._far(which).mean(0).clamp(min=0).sqrt()

    def _far(self, which: str) -> Tensor:
        return self._each(lambda k: self.squares(which, self.prefix(k) - self.limit) * self.correction(k) ** 2)

    def slopes(self) -> dict[str, Estimate]:
        """Slopes over k, with errors from groups of orders."""
        squares = {"increment": self.increments.square(), "distance": self.distances.square()}
        if self.of.gradients is not None:
            squares |= {"gradient": self._far("gradients"), "hessian": self._far("hessians")}
        return {name: _slope(self.sizes, each) for name, each in squares.items()} if len(self.sizes) > 1 else {}


def _slope(sizes: list[int], squares: Tensor) -> Estimate:
    """Least squares of log RMS against log k; the error from leaving out one group of orders at a time.

    NaN where nothing is left but 0.
    """
    x = torch.tensor(sizes, dtype=torch.float64).log()
    x = x - x.mean()

    def fitted(rows: Tensor) -> float:
        y = rows.mean(0).log() / 2
        return float(x @ y / (x @ x)) if bool(y.isfinite().all()) else math.nan

    groups = squares.tensor_split(GROUPS)
    without = [fitted(torch.cat([g for j, g in enumerate(groups) if j != i])) for i in range(len(groups))]
    spread = torch.tensor(without, dtype=torch.float64)
    error = (spread - spread.mean()).square().sum().mul((GROUPS - 1) / GROUPS).sqrt()
    value = torch.tensor(fitted(squares), dtype=torch.float64, device="cpu")
    return Estimate(value, error, len(squares), dof=GROUPS - 1, provenance={"samples": "orders"})


def _closed(table: _Orders, radius: float, around: Around) -> tuple[Tensor, ...]:
    """Mean and second moment of D_k, the parts of the bound, and the moments of the terms, by the quadratic model."""
    of, N = table.of, table.of.dimension
    assert of.traces is not None
    assert of.trace_products is not None
    columns: list[list[Tensor]] = [[] for _ in range(8)]
    for k in table.sizes:
        factor, w = table.share(k) * (k + 1), table.step(k)
        loss, trace = w @ of.loss, w @ of.traces
        slope = table.squares("gradients", w).clamp(min=0)
        norm = table.squares("hessians", w).clamp(min=0)
        traced = table.squares("trace_products", w)
        r2 = radius**2
        if around == "sphere":
            half, linear = r2 / (2 * N), r2 / N * slope
            spread = r2**2 / (2 * N * (N + 2)) * (norm - traced / N)
        else:
            half, linear = r2 / 2, r2 * slope
            spread = r2**2 / 2 * norm
        mean, quadratic = loss + half * trace, half**2 * traced + spread
        second = loss.square() + linear + 2 * half * loss * trace + quadratic
        far = radius if around == "sphere" else radius * math.sqrt(N)
        parts = (
            (factor * mean).mean(),
            (factor.square() * second).mean(),
            (factor * loss).abs().mean(),
            (factor * slope.sqrt()).mean() * far,
            (factor * norm.sqrt()).mean() * far**2 / 2,
            *((factor.square() * term).mean() for term in (loss.square(), linear, quadratic)),
        )
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return tuple(torch.stack(column) for column in columns)


def _sampled(
    problem: Problem,
    table: _Orders,
    radius: float,
    around: Around,
    basis: Tensor | None,
    mask: Tensor | None,
    points: int,
    generator: torch.Generator,
    tick: Callable[[], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and second moment of D_k on the true loss, and the error of the latter over the points."""
    theta, N = problem.theta.double(), table.of.dimension
    found = list[Tensor]()
    for _ in range(points):
        x = torch.randn(N, generator=generator, dtype=torch.float64)
        x = radius * (x / x.norm() if around == "sphere" else x)
        d = x.to(theta.device) if basis is None else x.to(theta.device) @ basis.to(theta.device, torch.float64)
        if mask is not None:
            d = torch.zeros_like(theta).masked_scatter_(mask.to(theta.device), d)
        try:
            loss, _ = losses(Separated(problem.with_params((theta + d).to(problem.dtype)), 1), tick)
        except NonFiniteLossError as error:
            raise CurvlensError(f"At a radius of {radius:g} the loss is not finite. Give smaller radii.") from error
        found.append(torch.stack([table.share(k) * (k + 1) * (table.step(k) @ loss) for k in table.sizes], 1))
    D = torch.stack(found)  # (points, orders, K)
    squares = D.square().mean(1)
    return D.mean((0, 1)), squares.mean(0), squares.std(0) / math.sqrt(points)


def _probed(table: _Orders, radii: list[float], around: Around, second: Tensor) -> Tensor:
    """(R, K): the error of ``second`` by the probes, leaving out one group at a time; NaN if they are too few."""
    left_out = [table.of_others(each) for each in table.of.without]
    if not left_out:
        return torch.full_like(second, math.nan)
    without = torch.stack([torch.stack([_closed(each, r, around)[1] for r in radii]) for each in left_out])
    return (without - without.mean(0)).square().sum(0).mul((len(left_out) - 1) / len(left_out)).sqrt()


def _holds(radii: list[float], second: Tensor, true: Tensor, error: Tensor, probed: Tensor) -> tuple[float | None, str]:
    """The largest radius at which the second moments agree at all k, with all smaller ones; what is too noisy."""
    held = None
    if bool(probed.isnan().any()):
        return None, "2 probes have no error, so whether the model holds is not told: give 3 or more"
    for i in sorted(range(len(radii)), key=radii.__getitem__):
        noise = 2 * (error[i].square() + probed[i].square()).sqrt()
        off, allowed = (true[i] - second[i]).abs(), (AGREEMENT * second[i].abs()).maximum(noise)
        if not bool((off <= allowed).all()):
            break
        if not bool((noise <= NOISE * second[i].abs()).all()):
            few = "points" if bool((error[i] >= probed[i]).all()) else "probes"
            return held, f"at {radii[i]:.3g} the {few} are too few to tell whether the model holds: give more {few}"
        held = radii[i]
    return held, ""


def _gradient_norm(problem: Problem, mask: Tensor | None) -> float:
    g = problem.gradient().double()
    return float((g if mask is None else g[mask.to(g.device)]).norm())


def _radii(radii: float | Iterable[float]) -> list[float]:
    try:
        values = sorted({float(r) for r in _listed(radii)})
    except (TypeError, ValueError):
        values = [math.nan]
    if not all(SMALLEST <= r <= LARGEST for r in values):
        raise CurvlensError(
            f"radii={radii!r:.80}, expected numbers from {SMALLEST:g} to {LARGEST:g}, such as [0.01, 0.1]."
        )
    return values


def _listed(given: object) -> list[Any]:
    """One number, or several, as a list."""
    if isinstance(given, (int, float)) or (isinstance(given, Tensor) and not given.ndim):
        return [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError
    return list(given)


def _sizes(ks: Iterable[int] | None, n: int) -> list[int]:
    if ks is None:
        return [2**i for i in range(2, 40) if 2**i <= n // 2]
    try:
        values = sorted({int(k) if whole(k) else k for k in _listed(ks)})
    except TypeError:
        values = []
    if not values or not all(whole(k) and 1 <= k < n for k in values):
        raise CurvlensError(f"ks={ks!r:.80}, expected whole numbers from 1 to {n - 1}: the data has {n} samples.")
    return [int(k) for k in values]


def _mask(problem: Problem, within: str | Sequence[str]) -> Tensor:
    """True for the entries of the named blocks."""
    inner = problem.layout.select(within)
    return problem.layout.embed(inner, torch.ones(inner.size, device=problem.device)) > 0


def _check_basis(basis: Tensor, problem: Problem) -> None:
    size = problem.layout.size
    if not isinstance(basis, Tensor) or basis.ndim != 2 or basis.shape[1] != size or not len(basis):
        given = tuple(basis.shape) if isinstance(basis, Tensor) else type(basis).__name__
        raise CurvlensError(f"basis has shape {given}, expected (directions, {size}): cl.eigs(H, 5).vectors.T.")
    rows = basis.double()
    off = float((rows @ rows.T - torch.eye(len(rows), dtype=torch.float64, device=rows.device)).abs().max())
    if not off < 1e-4:
        raise CurvlensError(
            f"The rows of basis are not orthonormal: off by {off:.1g}. Use torch.linalg.qr(basis.T).Q.T."
        )
