"""The loss along a line: how far is it quadratic?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlens._evaluation.sums import Number, summed
from curvlens._evaluation.third import courses
from curvlens.dynamics.direction import Direction, flat, length_of
from curvlens.dynamics.provenance import provenance
from curvlens.errors import CurvlensError, NonFiniteLossError
from curvlens.interrupts import must_be_whole
from curvlens.linalg.counted import whole
from curvlens.linalg.vectors import dot, norm
from curvlens.operators import hessian
from curvlens.operators.base import Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import Line, Status
from curvlens.surroundings import as_found

AGREEMENT = 0.05
"""Of the predicted change: how far the loss may be from its quadratic model."""
STRIDE, UP, DOWN = 4.0, 4, 10
"""The range is 4^-10 to 4^4 times the first radius, 1 % of ‖θ‖: 1e-8 ‖θ‖ to 2.6 ‖θ‖."""
FIRST = 0.01
RESOLUTION = 1.05
"""A radius is known when a larger one by this factor is known to be too large."""
ROUNDING = 8
"""Units in the last place by which a loss may be off."""


@as_found
def line(
    problem: Problem,
    direction: Direction,
    *,
    radii: Iterable[float] | None = None,
    loss: float | None = None,
    gradient: Tensor | float | None = None,
    curvature: Tensor | float | None = None,
    evaluations: int = 24,
    third: bool = False,
    progress: Progress | None = None,
) -> Line:
    """The loss at θ + t u, u = direction/‖direction‖, beside L + t gᵀu + ½ t² uᵀHu, and how far the two agree.

    They agree at t if |loss(t) − model(t)| ≤ 5 % · max(C(t), floor). C(t) is the largest change |model(s) − L| for s
    between 0 and t: at a t where the model has come back to L, the change on the way there counts. The floor is what
    rounding can do: 20 · eps · (8 |L| + ‖g‖ ‖θ‖), with the eps of the least precise step of the model. A loss that is
    NaN or infinite never agrees.

    The radius on each side is the largest t known to agree. It is searched for from 1 % of ‖θ‖, in steps by the factor
    4, then by bisection of log t until it is known to 5 %. All radii that were computed below it agree; a disagreement
    that comes and goes between two of them is not seen. With ``radii`` these t, on both sides, are computed and no
    others.

    Args:
        problem: where θ is; the model is not touched.
        direction: a flat vector or a dict by parameter name, of any length but 0.
        radii: positive numbers t, in units of ‖u‖ = 1.
        loss: the loss at θ, if it is known: saves a forward pass.
        gradient: the gradient at θ, or gᵀdirection as a number: saves a gradient.
        curvature: H @ direction, or directionᵀ H direction as a number: saves a product.
        evaluations: the most forward passes of a search.
        third: also the third derivative along the line, by three reverse passes: some five gradients.
        progress: called as ``progress(done, total)`` after every forward pass.

    >>> model = torch.nn.Linear(3, 1, bias=False).double()
    >>> problem = Problem(model, (torch.eye(3, dtype=torch.float64), torch.zeros(3, 1)), MSE())
    >>> result = line(problem, torch.ones(3, dtype=torch.float64))
    >>> round(result.curvature, 9), result.forward_open  # ‖w‖²/3 is its own quadratic model
    (0.666666667, True)
    """
    require_problem(problem, "line")
    if not whole(evaluations) or evaluations < 3:
        raise CurvlensError(f"evaluations={evaluations!r}, expected a whole number of forward passes, 3 or more.")
    given = None if radii is None else _checked(radii)
    d = flat(problem, direction)
    length = length_of(d)
    theta = problem.theta
    slope, steepness = _slope(problem, d, gradient)
    quadratic = _quadratic(problem, d, curvature)
    cubic = _third(problem, d / length) if third else None
    total = 1 + 2 * len(given) if given is not None else int(evaluations)
    walk = Walk(problem, theta, d, length, slope / length, quadratic / length**2, steepness, total, progress)
    walk.third = cubic
    try:
        walk.begin(loss)
        if given is not None:
            walk.over({1: given, -1: given})
            status, note = Status.COMPLETE, ""
        else:
            status, note = walk.search(int(evaluations))
    except KeyboardInterrupt:
        if must_be_whole() or 0.0 not in walk.losses:
            raise
        status, note = Status.INTERRUPTED, f"interrupted after {walk.evaluations} forward passes"
    return walk.result(status, note)


@dataclass
class Walk:
    """Losses along one line, and what is known of the two radii."""

    problem: Problem
    theta: Tensor
    d: Tensor
    length: float
    slope: float
    curvature: float
    steepness: float
    total: int
    progress: Progress | None
    losses: dict[float, float] = field(default_factory=dict)
    known: dict[int, float] = field(default_factory=lambda: {1: 0.0, -1: 0.0})
    """By side, the largest radius that is known to agree, with all computed ones below it."""
    open: dict[int, bool] = field(default_factory=lambda: {1: False, -1: False})
    evaluations: int = 0
    floor: float = 0.0
    third: float | None = None

    def begin(self, loss: float | None) -> None:
        """The loss at θ, and what rounding can do to it."""
        self.losses[0.0] = self._loss(0.0) if loss is None else float(loss)
        if not math.isfinite(self.losses[0.0]):
            raise CurvlensError(f"The loss at θ is {self.losses[0.0]}. A quadratic model needs a finite one.")
        eps = torch.finfo(self.problem._evaluation.checked.coarsest or self.problem.dtype).eps
        self.floor = eps / AGREEMENT * (ROUNDING * abs(self.losses[0.0]) + self.steepness * norm(self.theta))

    def _loss(self, t: float) -> float:
        point = self.theta + (t / self.length) * self.d if t else self.theta
        try:
            value = self.problem.with_params(point).loss() if t else self.problem.loss()
        except NonFiniteLossError:
            if not t:
                raise
            value = math.inf
        self.evaluations += 1
        if self.progress is not None:
            self.progress(self.evaluations, self.total)
        return value

    def change(self, t: float) -> float:
        """The change that the model predicts at t."""
        return t * self.slope + 0.5 * t * t * self.curvature

    def loss(self, t: float) -> float:
        """The loss at t, computed if it is not known."""
        if t not in self.losses:
            self.losses[t] = self._loss(t)
        return self.losses[t]

    def agrees(self, t: float) -> bool:
        """Whether loss and model agree at t."""
        largest = abs(self.change(t))
        if self.curvature and 0 < -self.slope / self.curvature / t < 1:  # the model turns on the way
            largest = max(largest, abs(self.change(-self.slope / self.curvature)))
        off = abs(self.loss(t) - self.losses[0.0] - self.change(t))
        return off <= AGREEMENT * max(largest, self.floor)

    def over(self, radii: dict[int, list[float]]) -> None:
        """All of some radii on each side, ascending: how far those in a row agree."""
        for side, values in radii.items():
            well = True
            for radius in values:
                well = self.agrees(side * radius) and well
                if well:
                    self.known[side] = radius
            self.open[side] = well

    def search(self, evaluations: int) -> tuple[Status, str]:
        """The radius of each side: a bracket by strides, then bisection."""
        unit = FIRST * (norm(self.theta) or 1.0)
        spare = evaluations - self.evaluations
        said, ended = [], set[Status]()
        for side, share in ((1, (spare + 1) // 2), (-1, spare)):
            limit = self.evaluations + share if side > 0 else evaluations
            status, note = self._search_side(side, unit, lambda limit=limit: self.evaluations < limit)  # type: ignore[misc]
            ended.add(status)
            said += [f"t {'>' if side > 0 else '<'} 0: {note}"] if note else []
        order = (Status.STOPPED_AT_BUDGET, Status.ACCURACY_NOT_REACHED, Status.COMPLETE, Status.CONVERGED)
        return next(status for status in order if status in ended), "; ".join(said)

    def _search_side(self, side: int, unit: float, may: Callable[[], bool]) -> tuple[Status, str]:
        low, high, power = 0.0, math.inf, 0
        while may() and not (low and high < math.inf):
            if self.agrees(side * unit * STRIDE**power):
                low, power = unit * STRIDE**power, power + 1
                self.known[side] = low
                if power > UP:
                    self.open[side] = True
                    return Status.COMPLETE, "the two agree in the whole range"
            else:
                high, power = unit * STRIDE**power, power - 1
                if power < -DOWN:
                    return Status.ACCURACY_NOT_REACHED, f"the two differ even at {high:.1e}, the smallest radius"
        while may() and high > RESOLUTION * low:
            middle = math.sqrt(low * high)
            if self.agrees(side * middle):
                low = self.known[side] = middle
            else:
                high = middle
        if high <= RESOLUTION * low:
            return Status.CONVERGED, ""
        return Status.STOPPED_AT_BUDGET, f"the radius is between {low:.3g} and {high:.3g}. Give more evaluations"

    def result(self, status: Status, note: str) -> Line:
        """What was found."""
        radii = torch.tensor(sorted(self.losses), dtype=torch.float64)
        start = self.losses[0.0]
        return Line(
            radii=radii,
            losses=torch.tensor([self.losses[t] for t in radii.tolist()], dtype=torch.float64),
            model=torch.tensor([start + self.change(t) for t in radii.tolist()], dtype=torch.float64),
            slope=self.slope,
            curvature=self.curvature,
            third=self.third,
            forward=self.known[1],
            backward=self.known[-1],
            forward_open=self.open[1],
            backward_open=self.open[-1],
            agreement=AGREEMENT,
            floor=self.floor,
            norm=self.length,
            status=status,
            evaluations=self.evaluations,
            note=note,
            provenance=provenance(self.problem),
        )


def _checked(radii: Iterable[float]) -> list[float]:
    values = sorted({float(radius) for radius in radii})
    if not values or not all(0 < value < math.inf for value in values):
        raise CurvlensError(
            f"radii={values!r:.80}, expected some positive numbers, such as [0.01, 0.1, 1]; both signs are computed."
        )
    return values


def _slope(problem: Problem, d: Tensor, gradient: Tensor | float | None) -> tuple[float, float]:
    """gᵀd, and ‖g‖; |gᵀd|/‖d‖ in its place if the gradient is not known."""
    if isinstance(gradient, (int, float)):
        return float(gradient), abs(float(gradient)) / norm(d)
    g = problem.gradient() if gradient is None else flat(problem, gradient, "The gradient")
    return dot(g, d), norm(g)


def _quadratic(problem: Problem, d: Tensor, curvature: Tensor | float | None) -> float:
    """dᵀHd."""
    if isinstance(curvature, (int, float)):
        return float(curvature)
    product = hessian(problem) @ d if curvature is None else flat(problem, curvature, "curvature=H @ direction")
    return dot(product, d)


def _third(problem: Problem, u: Tensor) -> float:
    """∇³L[u, u, u]."""
    total = Number()
    evaluation = problem._evaluation
    parts = problem.layout.unflatten(u.double())
    count = summed(evaluation, courses(evaluation, parts), lambda course, _: course.derivatives[2], [total])
    found = total.value / count
    if not math.isfinite(found):
        raise CurvlensError(
            f"The third derivative along the direction is {found}: torch has none of some step of the model here. "
            "Leave third=True out."
        )
    return found
