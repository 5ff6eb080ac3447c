"""`curvlens.profile`: the Gauss–Newton part and the functional part of every module, with errors, from a few probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlens._evaluation.recording import Recording
from curvlens._evaluation.recordings import Recordings
from curvlens._evaluation.sums import Table, summed
from curvlens.errors import CurvlensError, NotedWarning
from curvlens.interrupts import must_be_whole
from curvlens.linalg.counted import CountedOperator, warn, whole
from curvlens.linalg.eigs import eigs
from curvlens.operators import hessian
from curvlens.operators.base import Progress
from curvlens.operators.curvature import Curvature
from curvlens.operators.modules import ModulePart, recordings_of, require_path
from curvlens.problem import Problem
from curvlens.profiling.forecast import SLICE, Forecast, prepared
from curvlens.profiling.statistics import Forms, bounded, portion, root_mean
from curvlens.results import Eigs, Portion, Profile, Row, Status
from curvlens.results.profile import above, sum_tolerance
from curvlens.results.status import worst
from curvlens.surroundings import as_found

FEWEST = 4
"""The fewest probes for which errors mean something."""


@as_found
def profile(
    problem: Problem,
    samples: int = 16,
    *,
    seed: int = 0,
    top: bool | Eigs = True,
    spectral: bool | Iterable[str] = False,
    memory: int | float | str | None = None,
    announce: Callable[[Forecast], None] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Split the curvature of a model by module: H = GGN + Σ_m M_m, with the functional part M_m of every module m.

    Every probe goes through the model once for all modules: an adjoint pass, a tangent pass, and one product with H,
    which checks the sum of all terms.

    Args:
        problem: Model, data and loss; the model may be any ``nn.Module``, without changes.
        samples: The number of probes. Each costs about five gradients.
        seed: The seed of the probes.
        top: Also compute the eigenvector of the largest eigenvalue of H, and the contribution of each term to it. If
            you have ``eigs(H, 2)`` already, give it: then nothing is searched.
        spectral: Also compute ‖M_m‖₂ by Lanczos: True for all rows, or the paths of some. It costs dozens of products
            for each row.
        memory: The limit for everything, in bytes or as a text like ``"4GiB"``. The data is cut into smaller pieces,
            and fewer probes go together, until it fits. If it cannot fit, an error says so before any long work.
            Default: the budget of the problem for graphs, and the free memory for the rest.
        announce: Called with a `Forecast` of time and memory after one pass, before the first probe. The logger
            ``"curvlens"`` reports the same.
        progress: ``progress(done, total)`` is called with the number of completed probes, repeatedly during the work.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> result = profile(problem, samples=4)
    >>> [row.path for row in result], result.mismatch < 1e-12
    (['', '0', '1', '2'], True)
    """
    if not whole(samples) or samples < FEWEST:
        raise CurvlensError(f"samples={samples!r}, expected a whole number of probes, {FEWEST} or more.")
    recordings_of(problem)  # raises first if the problem cannot be profiled
    if not isinstance(spectral, Iterable | bool):
        raise CurvlensError(f"spectral={spectral!r}, expected True, False or paths of modules.")
    wanted = [] if isinstance(spectral, bool) else [spectral] if isinstance(spectral, str) else list(spectral)
    if isinstance(top, Eigs):
        _require_largest(top, problem)
    search = (bool(top) and not isinstance(top, Eigs)) or bool(spectral)
    problem, recordings, forecast = prepared(problem, int(samples), search=search, memory=memory)
    for path in wanted:  # a wrong path raises before any long work
        require_path(recordings, path)
    if announce is not None:
        announce(forecast)
    H = hessian(problem)
    products = CountedOperator(H, symmetric=True)
    probes, terms, status, note = products.probes(seed), _Terms(), Status.SAMPLED, ""

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, int(samples))

    try:
        for group in _groups(int(samples), forecast.group):
            working = partial(tell, group.start)
            terms.add(recordings, H, [probes.signs(i).to(H.dtype) for i in group], working)
            tell(group.stop)
    except KeyboardInterrupt:
        if must_be_whole() or len(terms) < FEWEST:
            raise
        status, note = Status.INTERRUPTED, f"interrupted after {len(terms)} of {samples} probes"
        warn(
            f"The profile was {note}; the errors are for the probes that were done. Eigenvalues were not computed.",
            NotedWarning,
        )
        top, spectral = False, False
    with torch.device("cpu"):
        result = terms.profile(recordings.known(), products.provenance(seed=seed, probes=len(terms)))
    result = replace(result, status=status, note=note)
    if recordings.blocked:
        return _with_gaps(result, recordings.blocked)
    try:
        working = partial(tell, int(samples))
        if isinstance(top, Eigs):
            result = _with_top(result, recordings, H, top, working)
        elif top:
            found = eigs(H, min(2, H.shape[0]), memory=forecast.search, progress=lambda done, total: working())
            result = _with_top(result, recordings, H, found, working)
        if spectral:
            paths = list(result.rows) if spectral is True else [result[path].path for path in wanted]
            result = _with_spectral(result, recordings, H, paths, forecast.search, partial(tell, int(samples)))
    except KeyboardInterrupt:
        if must_be_whole():
            raise
        note = "interrupted while eigenvalues were sought"
        warn(f"The profile was {note}; the estimates from the probes are complete.", NotedWarning)
        result = replace(_noted(result, note), status=Status.INTERRUPTED)
    if recordings.hidden:
        named = ", ".join(f"{path!r} in {caller or 'the model'!r}" for path, caller in recordings.hidden.items())
        note = f"run inside a transformation of torch.func and are counted with their callers: {named}"
        result = _noted(result, note)
    _check(result)
    return result


def _groups(samples: int, size: int) -> list[range]:
    """Probes that go through the model together. Norms need pairs of probes, so no group has a single one."""
    starts = list(range(0, samples, size))
    if samples - starts[-1] == 1 and len(starts) > 1:
        starts[-1] -= 1
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], samples], strict=True)]


class _Terms:
    """The forms of every term from the probes so far: of G, and of every module's own code."""

    def __init__(self) -> None:
        self.ggn: list[Forms] = []
        self.own: dict[str, list[Forms]] = {}
        self.squares: list[Tensor] = []
        """‖Hz‖² for the probes of each group."""
        self.mismatch = 0.0

    def __len__(self) -> int:
        return sum(map(len, self.squares))

    def add(self, recordings: Recordings, H: Curvature, z: list[Tensor], working: Callable[[], None]) -> None:
        """Add one group of probes; ``working`` is called repeatedly."""
        failed = None
        try:
            Hz = list(H.each(z, lambda done, total: working()))
        except CurvlensError as error:  # a module cannot be differentiated twice; others can
            failed, Hz = error, [torch.full_like(probe, math.nan) for probe in z]
        ggn, terms = forms_along(recordings, [*z, *Hz], len(z), working)
        if failed is not None and not recordings.blocked:
            raise failed
        truth, squares = _truth(z, Hz)
        stacked = torch.stack([ggn, *terms.values()])
        size = stacked.abs().sum(0).clamp(min=1e-300)
        apart = float(((stacked.sum(0) - truth).abs() / size).max())
        self.mismatch = apart if math.isnan(apart) else max(self.mismatch, apart)
        self.ggn.append(_forms(ggn))
        before = [Forms(torch.zeros_like(f.pairs), torch.zeros_like(f.with_hessian)) for f in self.ggn]
        for path in {**self.own, **terms}:
            known = self.own.get(path, before[:-1])
            self.own[path] = [*known, _forms(terms[path]) if path in terms else before[-1]]
        self.squares.append(squares)

    def profile(self, kinds: dict[str, str], provenance: dict[str, object]) -> Profile:
        """The profile from the probes so far."""
        squares, ggn = torch.cat(self.squares), Forms.joined(self.ggn)
        own = {path: Forms.joined(groups) for path, groups in self.own.items()}
        zero = Forms(0 * ggn.pairs, 0 * ggn.with_hessian)
        rows: dict[str, Row] = {}
        totals = _totals(own)
        for path in _ordered(kinds, own):
            mine, total = own.get(path, zero), totals.get(path, zero)
            rows[path] = Row(path, kinds[path], portion(mine, squares), portion(total, squares))
        everything = portion(sum(own.values(), ggn), squares)
        return Profile(
            hessian=replace(everything, frobenius=root_mean(squares)),
            ggn=portion(ggn, squares),
            rows=rows,
            mismatch=self.mismatch,
            samples=len(self),
            provenance=provenance,
        )


def _truth(z: list[Tensor], Hz: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(Hz)ᵀ [z, Hz] and ‖Hz‖² for every probe, in float64 on the CPU, without copies of whole vectors."""
    truth = torch.zeros(len(z), 2 * len(z), dtype=torch.float64, device="cpu")
    squares = torch.zeros(len(z), dtype=torch.float64, device="cpu")
    for start in range(0, len(z[0]), SLICE):
        x, y = (torch.stack([v[start : start + SLICE] for v in vs], 1).double() for vs in (z, Hz))
        truth += (y.T @ torch.cat([x, y], 1)).cpu()
        squares += y.square().sum(0).cpu()
    return truth, squares


def forms_along(
    recordings: Recordings, directions: Sequence[Tensor], bent: int, working: Callable[[], None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The forms of G and, by path, of every module's own code, over all the data."""
    parts = [recordings.evaluation.layout.unflatten(v) for v in directions]
    ggn, own = Table(), Table()

    def term(recording: Recording, which: int) -> dict[str, Tensor]:
        if which:
            return {"": outer.pop()}
        forms, at_outputs = recording.forms(parts, bent, lambda done, total: working())
        outer.append(at_outputs)
        return forms

    outer = list[Tensor]()
    count = summed(recordings.evaluation, recordings, term, [own, ggn])
    return ggn.values[""] / count, {path: forms / count for path, forms in own.values.items()}


def _forms(of: Tensor) -> Forms:
    """Split (k, 2k) into the forms of probes with each other and with H times each."""
    k = len(of)
    return Forms(of[:, :k], of[:, k:].diagonal())


def _totals(own: dict[str, Any]) -> dict[str, Any]:
    """Sums over each path and everything inside it."""
    totals: dict[str, Any] = {}
    for path, value in own.items():
        for p in (*above(path), path):
            totals[p] = totals[p] + value if p in totals else value
    return totals


def _ordered(kinds: dict[str, str], reached: Iterable[str]) -> list[str]:
    """The reached paths and those above them, in the order of the model; each before the paths inside it."""
    wanted = {p for path in reached for p in (*above(path), path)} | {""}
    inside: dict[str, list[str]] = {path: [] for path in kinds if path in wanted}
    for path in inside:
        if path:
            inside[next(p for p in reversed(above(path)) if p in inside)].append(path)
    found, todo = list[str](), [""]
    while todo:
        found.append(todo.pop())
        todo.extend(reversed(inside[found[-1]]))
    return found


def _require_largest(found: Eigs, problem: Problem) -> None:
    if len(found.vectors) != problem.layout.size:
        raise CurvlensError(
            f"top= has eigenvectors of {len(found.vectors):,} numbers, and the problem has {problem.layout.size:,} "
            "parameters. Give those of its Hessian: top=cl.eigs(cl.hessian(problem), 2)."
        )
    least = {"largest": 2, "both": 4}.get(found.ends)
    if len(found) < (len(found.vectors) if least is None else min(least, len(found.vectors))):
        raise CurvlensError(
            f"top= has {len(found)} eigenvalues at ends={found.ends!r}. Their errors need the two largest: give "
            "top=cl.eigs(cl.hessian(problem), 2), or top=True."
        )


def _with_top(
    result: Profile, recordings: Recordings, H: Curvature, found: Eigs, working: Callable[[], None]
) -> Profile:
    """The profile with every term's contribution to the largest eigenvalue."""
    outer, forms = forms_along(recordings, [found.vectors[:, -1].to(H.problem.theta).contiguous()], 1, working)
    ggn, own = float(outer), {path: float(form) for path, form in forms.items()}
    value, residual, along = float(found.values[-1]), float(found.residuals[-1]), ggn + sum(own.values())
    rounding = sum_tolerance(H.dtype) * (abs(ggn) + sum(map(abs, own.values())))
    if result.adds_up and abs(along - value) > residual + rounding:
        raise CurvlensError(
            f"Along the eigenvector the curvature is {along:.6g}, and not its eigenvalue {value:.6g}. Were the "
            "eigenvalues computed at other weights, or of another operator? Give top=cl.eigs(cl.hessian(problem), 2), "
            "or top=True."
        )
    # Davis and Kahan: the angle of u is wrong by at most residual/gap, and a form changes by twice that
    gap = float(found.values[-1] - found.values[-2]) if len(found) > 1 else math.inf
    off = min(1.0, residual / gap) if gap > 0 else 1.0

    def known(x: float, of: Portion) -> Portion:
        error, value = (torch.tensor(y, dtype=torch.float64, device="cpu") for y in (2 * off * float(of.frobenius), x))
        return replace(of, top=bounded(value, error, 1, found.status))

    rows, totals = {}, _totals(own)
    for path, row in result.rows.items():
        mine, total = own.get(path, 0.0), totals.get(path, 0.0)
        rows[path] = replace(row, own=known(mine, row.own), total=known(total, row.total))
    whole_ = known(along, result.hessian)
    status = worst([result.status, found.status])
    return replace(result, rows=rows, ggn=known(ggn, result.ggn), hessian=whole_, status=status)


def _with_spectral(
    result: Profile,
    recordings: Recordings,
    H: Curvature,
    paths: Iterable[str],
    memory: int,
    working: Callable[[], None],
) -> Profile:
    """The profile with ‖M‖₂ of the total of some rows, by Lanczos at both ends."""
    rows, status = dict(result.rows), result.status
    for path in paths:
        part = ModulePart(H.problem, recordings, path, own=False, rows=H.rows, columns=H.rows)
        found = eigs(part, k=1, ends="magnitude", memory=memory, progress=lambda done, total: working())
        value, residual = (x[0].abs().double().cpu() for x in (found.values, found.residuals))
        size = bounded(value, residual, found.products, found.status)
        rows[path] = replace(rows[path], total=replace(rows[path].total, spectral=size))
        status = worst([status, found.status])
    return replace(result, rows=rows, status=status)


def _with_gaps(result: Profile, blocked: dict[str, str]) -> Profile:
    """Note the modules without a second derivative. Their parts and those of later modules are NaN."""
    named = "; ".join(f"{path or 'the model itself'!r}: {why}" for path, why in blocked.items())
    note = f"not twice differentiable: {named}. Its part, the parts of later modules, GGN and Hessian are not known"
    warn(f"The profile has gaps. A module is {note} (NaN). Use a plain implementation of it.", NotedWarning)
    return replace(_noted(result, note), status=worst([result.status, Status.HAS_GAPS]))


def _noted(result: Profile, note: str) -> Profile:
    return replace(result, note="; ".join(filter(None, [result.note, note])))


def _check(result: Profile) -> None:
    """Raise an error if the terms do not add up."""
    if not result.adds_up:
        warn(
            f"The terms of the profile do not add up to the Hessian: they differ by {result.mismatch:.1g} of the sum "
            "of their sizes. Does the result of a module depend on more than its inputs and parameters?"
        )
