"""How do loss and curvature change with the size of the model, of its data, and with training?

A sweep: every setting and seed is a unit of a study. It is trained, measured and stored once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from curvlens.dynamics.learner import completed, learn
from curvlens.dynamics.size_up import Settings, measure, nothing
from curvlens.errors import CurvlensError, NonFiniteLossError, a_kind
from curvlens.linalg.counted import whole
from curvlens.operators.base import Progress
from curvlens.problem import Problem
from curvlens.results import Scaling, Status
from curvlens.study import Budget, Config, Record, Study, Unit, parse_budget, run
from curvlens.study.progress import StudyProgress
from curvlens.surroundings import as_found

Train = Callable[[Config], Problem | tuple[Problem, Problem]]
"""Trains a model from a setting and its seed, and returns its problem, or (problem, test problem)."""
KIND = "scaling"


@as_found
def scaling(
    settings: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    out: str | os.PathLike[str],
    *,
    train: Train | None = None,
    seeds: int | Sequence[int] = 3,
    top: int = 10,
    floor: float = 1e-6,
    products: int = 32,
    probes: int = 2,
    lanczos: int = 40,
    dense: int = 400,
    jobs: int = 1,
    budget: str | float | Budget | None = None,
    revision: int = 1,
    progress: Progress | None = None,
) -> Scaling:
    """Losses and curvature of models trained in many settings, as one table with errors.

    By default small GPTs learn to add; see `train` for your own. What is measured once is stored in the folder, and
    never measured again: a call that was stopped continues, and a larger grid, or more seeds, adds what is missing.
    Each model is measured on its training data, at the end of its training.

    Args:
        settings: a grid, as ``{"d_model": [4, 8], "samples": [64, 256], "steps": [0, 200]}``, of which all
            combinations are taken; or a list of single settings. Of the GPT: d_model, n_layer, n_head, mlp_ratio,
            digits, samples (distinct training samples), steps, batch, lr (of Adam), check (take the loss on other pairs
            after every so many steps and keep the weights of the lowest; 0 keeps the last).
        out: the folder of the study.
        train: your own: a function at the top of a module, which gets a setting with its "seed" as a mapping, and
            returns a `Problem` at its trained weights; or two, the second with test data.
        seeds: how many seeds, or which.
        top: the condition number is λ₁/λ_k of the Gauss–Newton matrix G, k of its eigenvalues from the largest on.
        floor: eigenvalues of those below this share of the largest are left out; ``kept`` says how many remain.
        products: samples for the trace, and as many for the Frobenius norm.
        probes: Lanczos runs for the share of negative eigenvalues.
        lanczos: products of each of them.
        dense: with so many parameters or fewer all eigenvalues of H are computed, and nothing is sampled.
        jobs: processes; each has one thread. Several need joblib.
        budget: a time, as "10m": no model is begun that would not end in time. The same call continues.
        revision: raise it when `train` gives other models for the same settings than before.
        progress: called as ``progress(done, total)`` after every model, counted without those stored before.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> grid = {"d_model": 2, "digits": 1, "samples": [8, 16], "steps": 0}
    >>> scaling(grid, folder, seeds=1)
    Scaling(2 trained models, 1 seed; samples 8 to 16; condition number of the top 10 of G)
    """
    how = Settings(top, floor, products, probes, lanczos, dense)
    name = "addition" if train is None else _name(train)
    wanted = _settings(settings, None if train is not None else completed)
    numbers = _seeds(seeds)
    limit = parse_budget(budget)
    if limit is not None and limit.seconds is None:
        raise CurvlensError(
            f"budget={budget!r}, expected a time: trainings have no common cost in gradients. As '10m'."
        )
    units = [
        Unit(KIND, revision, {"setting": setting, "seed": seed, "measured": asdict(how)})
        for seed in numbers
        for _, setting in wanted
    ]
    study = Study(out, identity={"train": name})
    status, note, left = Status.COMPLETE, "", 0
    try:
        left = run(
            study,
            units,
            {KIND: partial(work, train)},
            jobs=jobs,
            budget=limit,
            progress=None if progress is None else partial(_forward, progress),
        ).left
    except KeyboardInterrupt:
        left = len(study.missing(units))
        if left == len(units):
            raise
        status = Status.INTERRUPTED
    if left:
        ended = "interrupted" if status is Status.INTERRUPTED else "the budget is spent"
        note = f"{ended}, {left} of {len(units)} models are left: the same call continues"
        status = Status.STOPPED_AT_BUDGET if status is Status.COMPLETE else status
    stored = study.records(KIND)
    shown = [dict(given) for _ in numbers for given, _ in wanted]
    rows = [(given, stored[u.key]) for given, u in zip(shown, units, strict=True) if u.key in stored]
    if not rows:
        raise CurvlensError(f"budget={budget!r} ended before the first of {len(units)} models. Give more time.")
    return _result(rows, how, left, status, note, {"train": name, "revision": revision, **asdict(how)})


def work(train: Train | None, config: Config) -> Mapping[str, Any]:
    """The numbers of one setting and seed. A training whose loss is not finite has none."""
    try:
        found = (learn if train is None else train)({**config["setting"], "seed": config["seed"]})
        problem, test = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(problem, Problem) or not isinstance(test, Problem | None):
            raise CurvlensError(f"train returned {a_kind(found)}, expected a Problem, or two: (problem, test problem).")
        return measure(problem, test, Settings(**config["measured"]), config["seed"])
    except NonFiniteLossError:
        return nothing()


def _forward(progress: Progress, now: StudyProgress) -> None:
    progress(now.done, now.total)


def _result(
    rows: Sequence[tuple[Mapping[str, Any], Record]],
    how: Settings,
    left: int,
    status: Status,
    note: str,
    provenance: dict[str, Any],
) -> Scaling:
    given = dict.fromkeys(name for setting, _ in rows for name in setting)
    settings: dict[str, list[Any]] = {name: [setting.get(name) for setting, _ in rows] for name in given}
    settings["seed"] = [record.config["seed"] for _, record in rows]
    values, errors = (
        {
            name: torch.tensor([record.result[part][name] for _, record in rows], dtype=torch.float64, device="cpu")
            for name in rows[0][1].result[part]
        }
        for part in ("values", "errors")
    )
    return Scaling(settings, values, errors, how.top, float(how.floor), left, status, note, provenance)


def _settings(
    given: Mapping[str, Any] | Iterable[Mapping[str, Any]], complete: Callable[[Config], dict[str, Any]] | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every setting once, as given and with its defaults."""
    if isinstance(given, Mapping):
        lists = {name: _values(name, values) for name, values in given.items()}
        each: list[dict[str, Any]] = [dict(zip(lists, row, strict=True)) for row in product(*lists.values())]
    elif isinstance(given, Iterable) and not isinstance(given, str):
        each = []
        for setting in given:
            if not isinstance(setting, Mapping):
                raise CurvlensError(f"A setting is {a_kind(setting)}, expected a mapping, as {{'d_model': 8}}.")
            each.append(dict(setting))
    else:
        raise CurvlensError(
            f"settings is {a_kind(given)}, expected a grid, as {{'d_model': [4, 8], 'samples': [64, 256]}}, or a list "
            "of settings."
        )
    if not each or not any(each):
        raise CurvlensError("The grid is empty. Give values, as {'d_model': [4, 8], 'samples': [64, 256]}.")
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for setting in each:
        for name, value in setting.items():
            if not isinstance(name, str) or name == "seed":
                raise CurvlensError(f"{name!r} is no name of a setting. Seeds are given by seeds=[0, 1].")
            if not isinstance(value, (bool, int, float, str)):
                raise CurvlensError(f"{name}={value!r:.60}, expected a number, a text or a truth value.")
        full = setting if complete is None else complete(setting)
        found.setdefault(Unit(KIND, 1, full).key, (setting, full))
    return list(found.values())


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bool, int, float)):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise CurvlensError(f"{name}={values!r:.60}, expected a list of values, as {name}=[4, 8].")
    found = [x.item() if hasattr(x, "item") else x for x in values]
    if not found:
        raise CurvlensError(f"{name}=[] has no values: the grid would be empty. Give one at least.")
    return found


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    found = list(range(seeds)) if whole(seeds) else list(seeds) if isinstance(seeds, Iterable) else []  # type: ignore[arg-type]
    if not found or not all(whole(seed) and seed >= 0 for seed in found):
        raise CurvlensError(f"seeds={seeds!r:.60}, expected how many, as 3, or which, as [0, 1, 2].")
    return list(dict.fromkeys(found))


def _name(train: Any) -> str:
    name = getattr(train, "__qualname__", "")
    if not callable(train) or not name or "<" in name:
        raise CurvlensError(
            f"train={train!r:.80}, expected a function at the top of a module: its name says what the folder belongs "
            "to, and other processes import it."
        )
    return str(name)
