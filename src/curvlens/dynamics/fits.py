"""Laws fitted to a table of trained models: power laws, the loss law of model and data size, and what curvature adds.

All are functions of a table: a `Scaling`, or records of any origin. The mathematics: `docs/explanation/math.md`,
"Scaling".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from curvlens.calculus.exponents import student
from curvlens.dynamics.records import Table, chosen, differing, number, numeric, positive, quantities, seed_of
from curvlens.errors import CurvlensError, listing
from curvlens.linalg.counted import whole
from curvlens.results import Gain, LossLaw, Power
from curvlens.results.estimate import check_level

NAMES = ("E", "A", "alpha", "B", "beta")
FEWEST = 3
"""Sizes of the model, and of the data, that a law can be fitted to."""
STEEPEST = 5.0
"""The largest exponent that is tried."""
SMALLEST = 14.0
"""exp(-14) of the smallest loss is the smallest term that is tried: it is no part of any loss."""
TRIED = 12
"""Minimisations, from the best of all starts."""
FEWER = 3
"""The same for each left-out setting."""
SMOOTH = 0.05
"""Minima are searched with a wide square part first, which is smoother."""
SAID = 6
"""Seeds that a note names."""
DELTA = 1e-3
"""Where Huber's loss turns from square to linear, in log loss: Chinchilla's."""


def power_law(
    table: Table,
    quantity: str,
    over: str,
    *,
    where: Mapping[str, Any] | None = None,
    size: bool = False,
    level: float = 0.95,
) -> Power:
    """Fit y = a x^b to a quantity of trained models, over their size, data or steps.

    Args:
        table: a `Scaling`, or records with a "seed"; without one they count as one seed.
        quantity: the name of y, such as "lambda_max". Negative numbers have no logarithm and are refused.
        over: the name of x, such as "samples" or "parameters".
        where: the other settings, such as ``{"steps": 200}``: one row for each x and seed must remain.
        size: fit |y|, as for "lambda_min".
        level: of the intervals.

    >>> law = power_law([{"n": n, "norm": 3 / n**0.5} for n in (1, 4, 16, 64)], "norm", "n")
    >>> round(law.exponent, 9), round(law.prefactor, 9)
    (-0.5, 3.0)
    """
    check_level(level)
    if quantity == over:
        raise CurvlensError(
            f"quantity and over are both {over!r}, and y = x is no law. Give over= another column, such as 'samples'."
        )
    given = chosen(table, [quantity, over], where)
    rows = numeric(given, [quantity, over], where)
    by_seed: dict[Any, dict[float, float]] = {seed_of(row): {} for row in given}
    for row in rows:
        line = by_seed[seed_of(row)]
        if row[over] in line:
            same = [each for each in rows if each[over] == row[over] and seed_of(each) == seed_of(row)]
            raise CurvlensError(
                f"Several rows have {over}={row[over]:g} and the same seed. They differ in {listing(differing(same))}"
                ". Choose one of each: where={...}."
            )
        line[row[over]] = row[quantity]
    places = sorted(set().union(*by_seed.values()))
    seeds = [seed for seed, line in by_seed.items() if len(line) == len(places)]
    whole_seeds = [by_seed[seed] for seed in seeds]
    if len(places) < 3 or not whole_seeds:
        raise CurvlensError(
            f"A power law of {quantity!r} over {over!r} needs three values of {over!r}, and a seed with all of them. "
            f"There are {len(places)} values and {len(whole_seeds)} such seeds."
        )
    x = np.log(positive(over, places))
    values = positive(quantity, [[line[place] for place in places] for line in whole_seeds], size=size)
    y = np.log(values)
    centred = x - x.mean()
    slopes = y @ centred / (centred @ centred)
    levels = y.mean(1) - slopes * x.mean()
    if len(slopes) > 1:
        times = student(level, len(slopes) - 1) / math.sqrt(len(slopes))
        lines = levels[:, None] + np.outer(slopes, x)
        halves = [times * each.std(0, ddof=1) for each in (slopes, levels, lines)]
    else:
        scatter = y[0] - y[0].mean() - slopes[0] * centred
        dof = len(x) - 2
        spread = student(level, dof) * math.sqrt(scatter @ scatter / dof)
        slope = spread / math.sqrt(centred @ centred)
        halves = [slope, *(np.hypot(spread / math.sqrt(len(x)), slope * at) for at in (x.mean(), centred))]
    b, a = float(slopes.mean()), float(levels.mean())
    half, lever, around = halves
    return Power(
        quantity,
        over,
        b,
        (b - float(half), b + float(half)),
        a,
        (float(_exp(a - lever)), float(_exp(a + lever))),
        seeds=seeds,
        exponents=_column(slopes),
        x=_column(places),
        y=_column(values),
        low=_column(_exp(a + b * x - around)),
        high=_column(_exp(a + b * x + around)),
        level=level,
        note=_left_out_seeds([seed for seed in by_seed if seed not in seeds], len(by_seed), quantity, over),
    )


def _left_out_seeds(left: Sequence[Any], count: int, quantity: str, over: str) -> str:
    """What is said of seeds that are not part of a law."""
    if not left:
        return ""
    names = ", ".join(map(str, left[:SAID])) + (f" and {len(left) - SAID} more" if len(left) > SAID else "")
    return f"{len(left)} of {count} seeds left out, without {quantity} at every {over}: {names}"


def loss_law(
    table: Table,
    *,
    loss: str = "test_loss",
    parameters: str = "parameters",
    samples: str = "samples",
    where: Mapping[str, Any] | None = None,
    delta: float = DELTA,
    bootstrap: int = 200,
    seed: int = 0,
    level: float = 0.95,
) -> LossLaw:
    """Fit L(N, D) = E + A/N^α + B/D^β by Huber's loss on log L, from many starts.

    Args:
        table: a `Scaling`, or records.
        loss: the name of L. parameters: of N. samples: of D.
        where: the other settings, such as ``{"steps": 200}``.
        delta: where Huber's loss turns from square to linear.
        bootstrap: fits for the intervals, each to settings (N, D) drawn with replacement, with all of their rows. A law
            that does not fit has wide intervals, too.
        seed: of the draws.
        level: of the intervals.
    """
    check_level(level)
    if not whole(bootstrap) or bootstrap < 20:
        raise CurvlensError(f"bootstrap={bootstrap!r}, expected a number of fits, 20 or more.")
    data = _Losses.of(table, loss, parameters, samples, (), where)
    require_delta(delta)
    best, others = data.fit(delta)
    residuals = data.target - data.predict(best)[0]
    draws = np.random.default_rng(seed)
    drawn = np.stack([data.natural(data.resampled(draws).refit(best, others, delta)) for _ in range(bootstrap)])
    tails = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0).T.tolist()
    E, A, alpha, B, beta = data.natural(best).tolist()
    return LossLaw(
        E,
        A,
        alpha,
        B,
        beta,
        intervals={name: (low, high) for name, (low, high) in zip(NAMES, tails, strict=True)},
        residual=float(np.sqrt(np.mean(residuals**2))),
        N=_column(data.settings[data.groups, 0]),
        D=_column(data.settings[data.groups, 1]),
        loss=_column(np.exp(data.target)),
        level=level,
        at_bounds=data.at_bounds(best),
    )


def curvature_gain(
    table: Table,
    curvature: str | Sequence[str],
    *,
    loss: str = "test_loss",
    parameters: str = "parameters",
    samples: str = "samples",
    beside: str | Sequence[str] = (),
    where: Mapping[str, Any] | None = None,
    size: bool = False,
    delta: float = DELTA,
    level: float = 0.95,
) -> Gain:
    """What curvature adds to predicting the loss: every setting (N, D) is left out in turn and predicted.

    With curvature the law is multiplied by Π q_j^{c_j} for the given quantities q, with c fitted together with the law.

    Args:
        table: a `Scaling`, or records.
        curvature: one quantity or several, such as "trace" or ["lambda_max", "condition"].
        loss: the name of L. parameters: of N. samples: of D.
        beside: quantities that both have, such as "train_loss": then it is what curvature adds to these.
        where: the other settings, such as ``{"steps": 200}``.
        size: take |q|; otherwise negative numbers are refused, which have no logarithm.
        delta: where Huber's loss turns from square to linear.
        level: of the interval.
    """
    check_level(level)
    added, held = quantities(curvature, "curvature"), quantities(beside, "beside")
    if not added:
        raise CurvlensError("curvature=[] names no quantity. Give one, as curvature='trace'.")
    given = loss, parameters, samples
    _require_apart(added, held, given)
    require_delta(delta)
    names = [*given, *held, *added]
    rows = numeric(chosen(table, names, where), names, where)  # both predictions are of the same models
    alone, more = (_Losses.for_leaving_out(rows, given, each, None, size) for each in (held, [*held, *added]))
    without, with_curvature = alone.left_out(delta), more.left_out(delta)
    difference = without - with_curvature
    middle = float(difference.mean())
    half = student(level, len(difference) - 1) * float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return Gain(
        added,
        _column(without),
        _column(with_curvature),
        N=_column(alone.settings[:, 0]),
        D=_column(alone.settings[:, 1]),
        difference=middle,
        interval=(middle - half, middle + half),
        level=level,
    )


def _require_apart(added: Sequence[str], held: Sequence[str], law: tuple[str, str, str]) -> None:
    """Raise if a quantity is named for two purposes."""
    for name in added:
        if name in held:
            raise CurvlensError(
                f"{name!r} is in curvature and in beside. Both predictions would have it, so that it adds nothing. "
                "Name it in one of them."
            )
    for name in [*added, *held]:
        if name in law:
            argument = "curvature" if name in added else "beside"
            why = "what is predicted" if name == law[0] else "part of the law already"
            raise CurvlensError(
                f"{argument} names {name!r}, which is {why}. Give another quantity, as {argument}='trace'."
            )


def left_out(
    table: Table,
    quantities: Sequence[str],
    *,
    loss: str = "test_loss",
    parameters: str = "parameters",
    samples: str = "samples",
    where: Mapping[str, Any] | None = None,
    size: bool = False,
    delta: float = DELTA,
) -> np.ndarray:
    """Of every setting (N, D): the mean |error| of its log L, predicted from the others, by the law and quantities."""
    require_delta(delta)
    return _Losses.for_leaving_out(table, (loss, parameters, samples), quantities, where, size).left_out(delta)


def law_of(terms: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Logarithms of the three terms of the law from (e, a, α, b, β): log E, log A/N^α, log B/D^β, (3, …, rows)."""
    e, a, alpha, b, beta = terms
    return np.array([e + 0 * x, a - alpha * x, b - beta * y])


def summed(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm of the sum of terms, and their shares of it."""
    largest = logs.max(0)
    parts = np.exp(logs - largest)
    total = parts.sum(0)
    return largest + np.log(total), parts / total


@dataclass(frozen=True)
class _Losses:
    """Rows for the loss law: log N and log D about their means, log L, logarithms of other quantities."""

    x: np.ndarray
    y: np.ndarray
    target: np.ndarray
    more: np.ndarray
    """(rows, quantities)"""
    groups: np.ndarray
    """The setting of each row."""
    settings: np.ndarray
    """(settings, 2) N and D of each setting."""
    centre: tuple[float, float]

    @classmethod
    def of(
        cls,
        table: Table,
        loss: str,
        parameters: str,
        samples: str,
        more: Sequence[str],
        where: Mapping[str, Any] | None,
        size: bool = False,
    ) -> _Losses:
        names = [loss, parameters, samples, *more]
        rows = numeric(chosen(table, names, where), names, where)
        N, D, L = (positive(name, [row[name] for row in rows]) for name in (parameters, samples, loss))
        x, y = np.log(N), np.log(D)
        pairs = sorted(set(zip(N.tolist(), D.tolist(), strict=True)))
        counts = len(set(N.tolist())), len(set(D.tolist()))
        if min(counts) < FEWEST or len(pairs) < len(NAMES) + 1:
            raise CurvlensError(
                f"The loss law needs three model sizes and three data sizes at least, and {len(NAMES) + 1} pairs of "
                f"them. There are {counts[0]} values of {parameters!r}, {counts[1]} of {samples!r}, {len(pairs)} pairs."
            )
        places = {pair: i for i, pair in enumerate(pairs)}
        groups = np.array([places[pair] for pair in zip(N.tolist(), D.tolist(), strict=True)])
        logs = [np.log(positive(name, [row[name] for row in rows], size=size)) for name in more]
        z = np.stack(logs, 1) if logs else np.zeros((len(rows), 0))
        centre = float(x.mean()), float(y.mean())
        return cls(x - centre[0], y - centre[1], np.log(L), z, groups, np.array(pairs), centre)

    @classmethod
    def for_leaving_out(
        cls,
        table: Table,
        names: tuple[str, str, str],
        more: Sequence[str],
        where: Mapping[str, Any] | None,
        size: bool,
    ) -> _Losses:
        """Rows with settings enough that the law, and these quantities, can be fitted without one of them."""
        data = cls.of(table, *names, more, where, size)
        numbers = len(NAMES) + len(more)
        if len(data.settings) < numbers + 2:
            raise CurvlensError(
                f"{len(data.settings)} settings (N, D) are too few to leave one out and fit {numbers} numbers to the "
                "others. Measure more of them, or give fewer quantities."
            )
        return data

    def resampled(self, draws: np.random.Generator) -> _Losses:
        """As many settings, drawn with replacement, with all of their rows."""
        settings = len(self.settings)
        while True:
            drawn = draws.integers(0, settings, settings)
            found = self.part(np.concatenate([np.flatnonzero(self.groups == group) for group in drawn]))
            if min(len(np.unique(found.x)), len(np.unique(found.y))) >= FEWEST:
                return found

    def part(self, keep: np.ndarray) -> _Losses:
        x, y, target, more, groups = (each[keep] for each in (self.x, self.y, self.target, self.more, self.groups))
        return _Losses(x, y, target, more, groups, self.settings, self.centre)

    def predict(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log L of the law, and its derivative by p."""
        total, w = summed(law_of(p[:5], self.x, self.y))
        slopes = np.stack([w[0], w[1], -w[1] * self.x, w[2], -w[2] * self.y], 1)
        return total + self.more @ p[5:], np.concatenate([slopes, self.more], 1)

    def objective(self, p: np.ndarray, delta: float) -> tuple[float, np.ndarray]:
        """The mean of Huber's loss over delta, and its gradient."""
        predicted, slopes = self.predict(p)
        r = (predicted - self.target) / delta
        bent = np.clip(r, -1, 1)
        return float(np.mean(bent * (r - bent / 2))) * delta, slopes.T @ bent / len(r)

    def bounds(self) -> list[tuple[float | None, float | None]]:
        low, high = float(self.target.min()) - SMALLEST, float(self.target.max()) + SMALLEST
        size, power = (low, high), (0.0, STEEPEST)
        return [size, size, power, size, power, *[(None, None)] * self.more.shape[1]]

    def starts(self) -> np.ndarray:
        """A grid over the shares of the three terms in the middle, and over both exponents."""
        shares = [np.log(s) for s in product((0.02, 0.3, 0.7), repeat=3)]
        powers = list(product((0.1, 0.3, 0.7, 1.5), repeat=2))
        level = float(np.median(self.target))
        law = [[level + e, level + a, alpha, level + b, beta] for e, a, b in shares for alpha, beta in powers]
        return np.array([[*start, *[0.0] * self.more.shape[1]] for start in law])

    def fit(self, delta: float, tried: int = TRIED) -> tuple[np.ndarray, list[np.ndarray]]:
        """The best minimum, and the second best if there is another."""
        starts = self.starts()
        laws = summed(law_of(starts[:, :5].T[..., None], self.x, self.y))[0]
        order = np.abs(laws - self.target).mean(1).argsort()
        wide = sorted((self.minimum(start, max(SMOOTH, delta), 1e-8) for start in starts[order[:tried]]), key=_value)
        others = [each for each in wide if each[0] > 1.01 * wide[0][0]]
        found = sorted((self.minimum(start, delta) for _, start in (wide[0], *others[:1])), key=_value)
        return found[0][1], [start for _, start in found[1:]]

    def refit(self, best: np.ndarray, others: Sequence[np.ndarray], delta: float) -> np.ndarray:
        """The minimum of similar data, from minima of the whole."""
        wide = (self.minimum(start, max(SMOOTH, delta), 1e-8) for start in (best, *others))
        return self.minimum(min(wide, key=_value)[1], delta)[1]

    def minimum(self, start: np.ndarray, delta: float, tol: float = 1e-11) -> tuple[float, np.ndarray]:
        """By L-BFGS, until a step lowers the objective by less than the tolerance, relative to it."""
        found = optimize.minimize(
            self.objective,
            start,
            args=(delta,),
            jac=True,
            method="L-BFGS-B",
            bounds=self.bounds(),
            options={"maxiter": 2000, "maxfun": 4000, "ftol": tol, "gtol": 1e-8},
        )
        return float(found.fun), found.x

    def left_out(self, delta: float) -> np.ndarray:
        """For every setting: the mean |error| of log L, predicted from the others.

        Each fit is made anew. One that started at the minimum of all settings would know what it has to predict.
        """
        errors = []
        for group in range(len(self.settings)):
            out = self.groups == group
            data = self.standard(~out)
            p = data.part(~out).fit(delta, FEWER)[0]
            left = data.part(out)
            errors.append(float(np.abs(left.predict(p)[0] - left.target).mean()))
        return np.array(errors)

    def standard(self, known: np.ndarray) -> _Losses:
        """Other quantities about 0 and of size 1 in the known rows; 0 if they are constant there."""
        z = self.more - self.more[known].mean(0)
        spread = z[known].std(0)
        z = np.where(spread > 1e-9, z / np.maximum(spread, 1e-9), 0.0)
        return replace(self, more=z)

    def natural(self, p: np.ndarray) -> np.ndarray:
        """E, A, α, B, β."""
        e, a, alpha, b, beta = p[:5]
        x, y = self.centre
        with np.errstate(over="ignore"):
            return np.array([np.exp(e), np.exp(a + alpha * x), alpha, np.exp(b + beta * y), beta])

    def at_bounds(self, p: np.ndarray) -> list[str]:
        ends = zip(NAMES, p[:5], self.bounds()[:5], strict=True)
        return [name for name, x, (low, high) in ends if x - low < 1e-6 or high - x < 1e-6]


def _value(found: tuple[float, np.ndarray]) -> float:
    return found[0]


def require_delta(delta: object) -> None:
    """Raise unless it is a width that Huber's loss can have."""
    found = number(delta, "delta")
    if found is None or not found > 0:
        raise CurvlensError(f"delta={delta!r}, expected a number above 0, such as {DELTA:g}.")


def _exp(x: Any) -> Any:
    """exp x, infinite where float64 ends."""
    with np.errstate(over="ignore"):
        return np.exp(x)


def _column(x: Any) -> Tensor:
    """Numbers of a result."""
    return torch.as_tensor(np.array(x, dtype=float), device="cpu")
