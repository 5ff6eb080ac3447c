"""How fast did gradient descent settle, how curved was its path, and what does the spectrum say of both?

Along a step d the loss changes by gᵀd + ½ dᵀHd on a quadratic (`docs/explanation/math.md`, "Convergence").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.dynamics.rates import Known, Spectrum, factors, known
from curvlens.errors import CurvlensError, a_kind
from curvlens.linalg.counted import versions, whole
from curvlens.results import Convergence, Density, Eigs, Estimate, Status

BLOCKS = 5
"""Parts of the window of which one is left out at a time: longer than the memory of the trajectory, if they can be."""
FEWEST = 3 * BLOCKS
"""Steps that a rate needs."""
ENOUGH, MOST_DECIMALS = 8, 9
"""Losses that all end at the same decimal, up to so many, were rounded there."""
ROUNDING = 8
"""Units in the last place by which a loss may be off."""
FLOOR = 64
"""Units in the last place of the largest gradient that are rounding in a later one."""
SAME = 1e-3
"""Of its length: how far a step may be from −ηg and still be one of gradient descent."""
Numbers = Tensor | np.ndarray[Any, Any] | Sequence[float]
Vectors = Numbers | Sequence[Tensor]


def convergence(
    losses: Numbers,
    gradients: Vectors | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    parameters: Vectors | None = None,
    spectrum: Spectrum | Mapping[int, Spectrum] | None = None,
    subspace: str = "",
    last: float = 0.5,
) -> Convergence:
    """Curvature along the path of gradient descent, the rate at which its gradient shrinks, and that by a spectrum.

    Losses and gradients are those of the whole data, before each step and after the last one. From gradient descent
    gᵀHg/‖g‖² = 2(ΔL + η‖g‖²)/(η²‖g‖²), exact on a quadratic. Momentum does not step along the gradient: its curvature
    is taken along the steps, 2(ΔL − gᵀd)/‖d‖², and needs ``parameters`` and gradients as vectors. Without them there is
    none, and the note says so.

    The rate is exp(s) with the slope s of log ‖g_t‖ over the last part of the steps. Its error leaves out one fifth of
    them at a time, so that noise with a memory, and a rate that still changes, widen the interval. Without gradients it
    is that of √(L_t − L_{t+1}), which shrinks alike.

    The predicted rate is the largest factor per step over the eigenvalues: |1 − ηλ|, or with momentum the spectral
    radius of the 2 × 2 step. Eigenvalues that are 0 do not count: on a quadratic with a minimum the gradient has no
    part along them. It is a rate for the subspace of these eigenvalues, reached when all faster parts have died out.

    Args:
        losses: L_0, L_1, …, L_T.
        gradients: g_0, …, g_T as vectors, one in a row, or their norms.
        learning_rate: η, the same in all steps.
        momentum: torch's, without dampening.
        nesterov: torch's.
        parameters: θ_0, …, θ_T as flat vectors.
        spectrum: eigenvalues: numbers, an `Eigs` or a `Density`; or a dict of these by step, whose last one predicts
            the rate. Two numbers λ_min and λ_max are enough: the slowest factor of a range is at one of its ends.
        subspace: what the eigenvalues are of, in words, for the reader.
        last: the part of the steps at the end that the rate is fitted on.

    >>> gradients = [0.9**t for t in range(31)]  # the loss is w²/2, from w = 1 with η = 0.1
    >>> result = convergence([g * g / 2 for g in gradients], gradients, learning_rate=0.1, spectrum=[1.0])
    >>> round(float(result.rate), 9), round(result.predicted, 9), round(float(result.curvature[0]), 9)
    (0.9, 0.9, 1.0)
    """
    _check_rule(learning_rate, momentum, nesterov, last)
    L, eps = _losses(losses)
    rounded = _decimals(L)
    norms, vectors, fine = (L.new_empty(0), None, eps) if gradients is None else _gradients(gradients, len(L))
    points = None if parameters is None else _vectors(parameters, len(L), "parameters")
    notes = list[str]()
    steps = _steps(norms, vectors, points, learning_rate, momentum, notes)
    curvature = error = secant = L.new_empty(0)
    if steps is not None:
        change = L.diff()
        curvature = 2 * (change - steps.slope) / steps.square
        error = 4 * (ROUNDING * eps * torch.maximum(L[1:].abs(), L[:-1].abs()) + rounded) / steps.square
        secant = curvature.new_empty(0) if steps.bend is None else steps.bend / steps.square
    of, sizes = ("gradient", _above(norms, fine)) if len(norms) else ("decrements", _decrements(L, eps, rounded))
    rate, window = _rate(sizes, last, of, notes)
    _look(L, eps, momentum, learning_rate, notes)
    spectra = _spectra(spectrum, len(L))
    predicted = slowest = None
    if spectra:
        final = spectra[max(spectra)]
        found = factors(final.values, learning_rate, momentum, nesterov)
        predicted, slowest = float(found.max()), float(final.values[found.argmax()])
        if final.negative:
            notes.append(f"{final.negative} eigenvalues are below 0: along them the quadratic model has no minimum")
    return Convergence(
        rule=_said(learning_rate, momentum, nesterov),
        edge=None if momentum else 2 / learning_rate,
        losses=L,
        gradients=norms,
        curvature=curvature,
        curvature_error=error,
        secant=secant,
        rate=rate,
        of=of,
        window=window,
        spectrum_steps=torch.tensor(sorted(spectra), dtype=torch.int64),
        smallest=_ends(spectra, "min"),
        largest=_ends(spectra, "max"),
        subspace=subspace or (spectra[max(spectra)].subspace if spectra else ""),
        predicted=predicted,
        slowest=slowest,
        status=Status.COMPLETE,
        note="; ".join(notes),
        provenance={"versions": versions()},
    )


# What is given


def _check_rule(learning_rate: object, momentum: object, nesterov: bool, last: object) -> None:
    if not _number(learning_rate) or not 0 < learning_rate < math.inf:  # type: ignore[operator]
        raise CurvlensError(f"learning_rate={learning_rate!r}, expected a number above 0, such as 0.1.")
    if not _number(momentum) or not 0 <= momentum < 1:  # type: ignore[operator]
        raise CurvlensError(f"momentum={momentum!r}, expected a number from 0 to below 1, such as 0.9.")
    if nesterov and not momentum:
        raise CurvlensError("nesterov=True without momentum. Give momentum=0.9, or leave nesterov out.")
    if not _number(last) or not 0 < last <= 1:  # type: ignore[operator]
        raise CurvlensError(f"last={last!r}, expected a part of the steps above 0 and up to 1, such as 0.5.")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _losses(given: Numbers) -> tuple[Tensor, float]:
    """In float64, and the precision that they were computed in: numbers that are all float32 were."""
    given = _tensor(given)
    try:
        if torch.is_complex(torch.as_tensor(given)):
            raise TypeError
        wide = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise CurvlensError(
            f"losses is {a_kind(given)}, expected numbers: [L_0, L_1, …], one for each step."
        ) from error
    if wide.ndim != 1 or len(wide) < 2:
        raise CurvlensError(f"losses has shape {tuple(wide.shape)}, expected two numbers or more: [L_0, L_1, …].")
    _finite(wide, "losses")
    return wide, _precision(given, wide)


def _precision(given: object, wide: Tensor) -> float:
    """Of the numbers: by their dtype, and by their digits where a list or float64 holds what was float32."""
    if isinstance(given, Tensor) and given.is_floating_point() and given.dtype.itemsize < 8:
        return torch.finfo(given.dtype).eps
    narrow = bool((wide.float().double() == wide).all())
    return torch.finfo(torch.float32 if narrow else torch.float64).eps


def _decimals(L: Tensor) -> float:
    """By how much losses from a log may be off: half of the last decimal, if all of several end at the same one."""
    if len(L) < ENOUGH:
        return 0.0
    for digits in range(MOST_DECIMALS + 1):
        if bool((torch.round(L, decimals=digits) - L).abs().max() <= 2e-16 * L.abs().max()):
            return 0.5 * 10.0**-digits
    return 0.0


def _gradients(given: Vectors, count: int) -> tuple[Tensor, Tensor | None, float]:
    """Norms, the vectors if they were given, and their precision."""
    given = _tensor(given)
    if (isinstance(given, Tensor) and given.ndim == 1) or _plain(given):
        norms = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
        _finite(norms, "gradients")
        if len(norms) != count:
            raise CurvlensError(_lengths("gradients", len(norms), count))
        if bool((norms < 0).any()):
            raise CurvlensError(
                "gradients has a number below 0, and a norm has none. Give ‖g_t‖, or the gradients as vectors."
            )
        return norms, None, _precision(given, norms)
    vectors = _vectors(given, count, "gradients")
    largest = vectors.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    norms = (vectors / largest).norm(dim=1) * largest[:, 0]  # squares of large numbers are beyond float64
    return norms, vectors, _precision(given, vectors)


def _plain(given: object) -> bool:
    return (
        isinstance(given, Sequence)
        and len(given) > 0
        and all(_number(x) or (isinstance(x, Tensor) and x.ndim == 0) for x in given)
    )


def _tensor(given: Any) -> Any:
    return torch.from_numpy(given) if isinstance(given, np.ndarray) else given


def _vectors(given: object, count: int, name: str) -> Tensor:
    given = _tensor(given)
    try:
        rows = given if isinstance(given, Tensor) else torch.stack([row.detach() for row in given])  # type: ignore[attr-defined]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CurvlensError(
            f"{name} is {a_kind(given)}, expected flat vectors of one length, one for each loss: "
            "torch.nn.utils.parameters_to_vector(model.parameters()) makes one."
        ) from error
    rows = rows.detach().cpu().double()
    if rows.ndim != 2:
        raise CurvlensError(f"{name} has shape {tuple(rows.shape)}, expected (steps + 1, numbers).")
    if len(rows) != count:
        raise CurvlensError(_lengths(name, len(rows), count))
    _finite(rows, name)
    return rows


def _lengths(name: str, found: int, count: int) -> str:
    return (
        f"{name} has {found} entries and losses {count}. Give both before each step and after the last one: "
        "of T steps T + 1."
    )


def _finite(x: Tensor, name: str) -> None:
    bad = ~x.isfinite()
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise CurvlensError(
            f"{int(bad.sum())} of {x.numel()} numbers in {name} are NaN or infinite, the first at step {first}. The "
            f"run has diverged there: give the steps before it, {name}[:{first}]."
        )


# Curvature along the path


@dataclass(frozen=True)
class Steps:
    """Of each step d: gᵀd, ‖d‖² and dᵀ(g' − g), if the gradients are known as vectors."""

    slope: Tensor
    square: Tensor
    bend: Tensor | None


def _steps(
    norms: Tensor, vectors: Tensor | None, points: Tensor | None, rate: float, momentum: float, notes: list[str]
) -> Steps | None:
    if points is not None and vectors is not None:
        if points.shape != vectors.shape:
            raise CurvlensError(
                f"parameters has shape {tuple(points.shape)} and gradients {tuple(vectors.shape)}: give both of the "
                "same parameters, in the same order."
            )
        d, g = points.diff(dim=0), vectors[:-1]
        off = int(((d + rate * g).norm(dim=1) > SAME * d.norm(dim=1)).sum())
        if off and not momentum:
            notes.append(
                f"{off} of {len(d)} steps are not −η times the gradient given: curvature is along the steps taken"
            )
        return Steps((g * d).sum(1), d.square().sum(1), (d * vectors.diff(dim=0)).sum(1))
    if momentum:
        notes.append(
            "no curvature along the path: momentum does not step along the gradient. Give parameters= and gradients as "
            "vectors"
        )
        return None
    if not len(norms):
        notes.append("no curvature along the path: it needs gradients")
        return None
    if points is not None:
        notes.append("parameters were not used: that needs gradients as vectors")
    square = norms[:-1].square()
    bend = None if vectors is None else -rate * (vectors[:-1] * vectors.diff(dim=0)).sum(1)
    return Steps(-rate * square, rate**2 * square, bend)


def _look(L: Tensor, eps: float, momentum: float, rate: float, notes: list[str]) -> None:
    rises = int((L.diff() > 2 * ROUNDING * eps * L[1:].abs()).sum())
    if rises and not momentum:
        notes.append(
            f"the loss rose in {rises} of {len(L) - 1} steps: on a quadratic the curvature along them is above 2/η = "
            f"{2 / rate:.4g}, or the losses are not those of the whole data"
        )
    elif float(L[-1]) > float(L[0]):
        notes.append("the last loss is above the first")


# The rate that is seen


def _decrements(L: Tensor, eps: float, rounded: float) -> Tensor:
    """√|L_t − L_{t+1}|, 0 where rounding hides it."""
    change = L.diff().abs()
    return change.where(change > 2 * (ROUNDING * eps * L[1:].abs() + rounded), 0.0).sqrt()


def _above(norms: Tensor, eps: float) -> Tensor:
    """‖g‖, 0 where rounding hides it."""
    return norms.where(norms > FLOOR * eps * norms.max(), 0.0)


def _rate(sizes: Tensor, last: float, of: str, notes: list[str]) -> tuple[Estimate, tuple[int, int]]:
    """exp of the slope of log sizes over the last part, with the error of a block jackknife."""
    zero = (sizes == 0).nonzero()
    end = int(zero[0]) if len(zero) else len(sizes)
    if len(zero):
        notes.append(
            f"from step {end} on {'‖g‖' if of == 'gradient' else 'the change of the loss'} is 0 up to rounding"
        )
    first = max(min(end - math.ceil(last * end), end - FEWEST), 0)
    y = sizes[first:end].log()
    if len(y) < FEWEST:
        notes.append(f"no rate: it needs {FEWEST} steps, and there are {len(y)}")
        nothing = torch.tensor(math.nan, dtype=torch.float64)
        return Estimate(nothing, nothing.clone(), len(y), 1.0, "too few steps"), (first, max(end - 1, 0))
    slope = _slope(torch.arange(len(y), dtype=torch.float64), y)
    edges = [round(i * len(y) / BLOCKS) for i in range(BLOCKS + 1)]
    t, without = torch.arange(len(y), dtype=torch.float64), list[Tensor]()
    for low, high in pairwise(edges):
        rest = (t < low) | (t >= high)
        without.append(_slope(t[rest], y[rest]))
    others = torch.stack(without)
    error = ((BLOCKS - 1) / BLOCKS * (others - others.mean()).square().sum()).sqrt()
    value = slope.exp()
    return Estimate(value, value * error, len(y), float(BLOCKS - 1), positive=True), (first, end - 1)


def _slope(t: Tensor, y: Tensor) -> Tensor:
    centred = t - t.mean()
    return (centred @ y) / centred.square().sum()


# The rate by a spectrum


def _spectra(given: Spectrum | Mapping[int, Spectrum] | None, count: int) -> dict[int, Known]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {count - 1: known(given)}
    if not given:
        raise CurvlensError("spectrum is an empty dict. Give {step: eigenvalues}, or leave spectrum out.")
    for step in given:
        if not whole(step) or not 0 <= step < count:
            raise CurvlensError(f"A spectrum is at step {step!r}; the trajectory has the steps 0 to {count - 1}.")
    kinds = {type(each) if isinstance(each, (Eigs, Density)) else float for each in given.values()}
    if len(kinds) > 1:
        raise CurvlensError(
            "The spectra are of different kinds, so that their condition numbers are of different subspaces. Compute "
            "all of them in the same way."
        )
    return {step: known(each) for step, each in given.items()}


def _ends(spectra: Mapping[int, Known], end: str) -> Tensor:
    sizes = [getattr(spectra[step].values.abs(), end)() for step in sorted(spectra)]
    return torch.stack(sizes) if sizes else torch.empty(0, dtype=torch.float64)


def _said(learning_rate: float, momentum: float, nesterov: bool) -> str:
    if not momentum:
        return f"gradient descent, η = {learning_rate:g}"
    return f"{'Nesterov' if nesterov else 'heavy ball'}, η = {learning_rate:g}, β = {momentum:g}"
