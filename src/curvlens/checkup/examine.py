"""`doctor`: runs every check in order, and leaves model, data and random states unchanged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn

from curvlens._evaluation.exchange import apart
from curvlens.checkup.architecture import check_architecture
from curvlens.checkup.coupling import check_coupling, check_mask
from curvlens.checkup.data import check_data
from curvlens.checkup.embeddings import check_embeddings
from curvlens.checkup.finding import Finding
from curvlens.checkup.kernels import check_attention, check_checkpointing, check_compiled, check_second_derivatives
from curvlens.checkup.labels import check_labels
from curvlens.checkup.modes import check_modes
from curvlens.checkup.norms import check_norms
from curvlens.checkup.numerics import check_outputs, check_values
from curvlens.checkup.padding import check_padding
from curvlens.checkup.parameters import check_frozen, check_offloaded, check_quantised, check_ties, check_unused
from curvlens.checkup.patient import Patient
from curvlens.checkup.positions import check_positions, check_shift
from curvlens.checkup.precision import check_autocast, check_half, check_inside, check_islands
from curvlens.checkup.refusal import refused
from curvlens.checkup.report import Report
from curvlens.checkup.softmax import check_softmax
from curvlens.checkup.untouched import untouched
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses import Loss, as_loss
from curvlens.problem import Problem
from curvlens.surroundings import as_found, guarded

Check = Callable[[Patient], Iterable[Finding]]

STATIC_CHECKS: tuple[Check, ...] = (
    check_compiled,
    check_attention,
    check_checkpointing,
    check_data,
    check_offloaded,
    check_quantised,
    check_frozen,
    check_ties,
)
"""Checks that inspect model and data without running the model."""
FORWARD_CHECKS: tuple[Check, ...] = (
    check_half,
    check_autocast,
    check_inside,
    check_islands,
    check_outputs,
    check_padding,
    check_mask,
    check_coupling,
    check_positions,
    check_shift,
    check_softmax,
    check_norms,
)
"""Checks that run forward passes over the first batch, or over a few of its samples."""
PROBLEM_CHECKS: tuple[Check, ...] = (check_architecture, check_second_derivatives, check_unused)
"""Checks that need a `Problem`: names and derivatives."""
PREVENT_PASSES = {"offloaded-parameters", "fused-attention"}
"""Findings after which the model is not run. A pass would fail, or compile a kernel first."""
VARIABLE_DATA = {"shuffled-data", "changing-data"}
"""Findings after which the other checks use the first batch alone, as fixed data."""
PREVENT_PROBLEM = {
    *("one-shot-data", "offloaded-parameters", "quantised-weights", "complex-parameters", "random-loss"),
    *("not-finite-values", "not-finite-output"),
}
"""Findings that explain why `Problem` refuses. Its own message is then left out."""


@as_found
def doctor(
    problem: Problem | nn.Module,
    data: Any = None,
    loss: Any = None,
    params: str | Iterable[str] | None = None,
    micro_batch: int | None = None,
) -> Report:
    """Check a model, its data and its loss for anything that would make a curvature wrong or impossible.

    Call ``doctor(problem)``, or ``doctor(model, data, loss)`` if `Problem` refuses: the reason is then a finding too.
    Each finding has a ``fix``, a line of code. Apply the fixes of all errors, then call `doctor` again.
    ``report.require()`` raises while there are errors.

    The checks make a handful of passes over the first batch and read at most 64 batches, two or three times. Model,
    data and random states are unchanged afterwards. If dropout or torch.compile is on, that is a finding, and the other
    checks run without it.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)).double(), torch.ones(4, 2).double()
    >>> report = doctor(model, (x, x[:, :1]), MSE())
    >>> report.errors[0].name, report.errors[0].fix
    ('dropout-active', 'model.eval()')
    """
    if isinstance(problem, Problem):
        if not (data is None and loss is None and params is None and micro_batch is None):
            raise CurvlensError(
                "doctor was given a Problem and further arguments; expected the Problem alone, which has its data, "
                "loss and params: doctor(problem)."
            )
        own = copy.copy(problem)  # the checks must not change what the problem has cached
        return _report(Patient(own.model, own.data.source, own.loss_function, own), lambda source: own)
    if not isinstance(problem, nn.Module):
        raise CurvlensError(
            f"doctor was given {a_kind(problem)}, expected a Problem or a torch.nn.Module. Call doctor(problem), or "
            "doctor(model, data, loss)."
        )
    if data is None or loss is None:
        missing = " and ".join(name for name, value in (("data", data), ("loss", loss)) if value is None)
        raise CurvlensError(f"doctor was given a model without {missing}. Call doctor(model, data, loss).")
    model = problem

    def build(source: Any) -> Problem:
        return Problem(model, source, loss, params, micro_batch=micro_batch)

    return _report(Patient(model, data, _loss(loss, model), None), build)


def _loss(loss: Any, model: nn.Module) -> Loss | None:
    try:
        return copy.copy(as_loss(loss)).for_model(model)
    except CurvlensError:
        return None  # `Problem` refuses this loss with a message, which becomes a finding


def _report(patient: Patient, build: Callable[[Any], Problem]) -> Report:
    def report() -> Report:
        with ExitStack() as stack:
            put_back = stack.enter_context(untouched(patient.model, patient.source))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the findings say the same
            return Report(_examine(patient, build, put_back, stack))

    # `catch_warnings` may skip its exit at a Ctrl-C; this does not
    names = ("filters", "showwarning")
    as_before = map(setattr, repeat(warnings), names, [getattr(warnings, name) for name in names])
    return guarded((), partial(apart, patient.model, report), as_before)


def _examine(
    patient: Patient, build: Callable[[Any], Problem], put_back: Callable[[], None], stack: ExitStack
) -> Iterator[Finding]:
    """Run all checks and yield their findings in order."""
    found: list[Finding] = []
    given, patient.problem = patient.problem, None

    def names() -> set[str]:
        return {f.name for f in found}

    def make(checks: Iterable[Check], unless: Set[str] = frozenset()) -> None:
        for check in checks:
            if not names() & unless:
                found.extend(_guarded(check, patient))

    make(STATIC_CHECKS)
    if "compiled-model" in names():
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    if not names() & PREVENT_PASSES:
        patient.problem = given
        patient.admit()
        make([check_modes])
        put_back()  # so that the next checks see the original tensors, should the model write into its own
    make([check_values, check_labels])
    refusal = None
    if not names() & {*PREVENT_PASSES, "one-shot-data"}:
        frozen = [patient.batch] if names() & VARIABLE_DATA and patient.batch is not None else patient.source
        try:
            patient.problem = build(frozen)
        except Exception as error:
            refusal = error
    if patient.runs:
        make(FORWARD_CHECKS, unless={"random-loss"})
        # Unmasked or counted padding also uses its embedding row: one finding is enough.
        make([check_embeddings], unless={"random-loss", "unmasked-padding", "counted-padding"})
        if patient.problem is not None:
            make(PROBLEM_CHECKS, unless={*PREVENT_PROBLEM, "gradient-checkpointing"})
    if refusal is not None and not names() & PREVENT_PROBLEM:
        found.append(refused(refusal, patient))
    yield from found


def _guarded(check: Check, patient: Patient) -> list[Finding]:
    """The findings of a check. If the check raises, that is a finding too."""
    found: list[Finding] = []
    try:
        found.extend(check(patient))
    except Exception as error:
        found.append(
            Finding(
                "check-failed",
                "warning",
                f"{check.__name__} failed: {type(error).__name__}: {str(error).strip()[:300]}",
                "It is unknown whether the model has what this check looks for.",
                "problem.loss(); problem.gradient()  # if these fail, fix their error first",
            )
        )
    return found
