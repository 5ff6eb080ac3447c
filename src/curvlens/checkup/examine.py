"""The examination: every check in its turn, and nothing left behind."""

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
from curvlens.exchange import apart
from curvlens.losses import Loss, as_loss
from curvlens.problem import Problem
from curvlens.surroundings import as_found, guarded

Check = Callable[[Patient], Iterable[Finding]]

STILL: tuple[Check, ...] = (
    check_compiled,
    check_attention,
    check_checkpointing,
    check_data,
    check_offloaded,
    check_quantised,
    check_frozen,
    check_ties,
)
"""Checks that look at the model and the data and run nothing."""
RUNNING: tuple[Check, ...] = (
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
"""Checks that need a forward pass over the first batch, or a few of its samples."""
DERIVING: tuple[Check, ...] = (check_architecture, check_second_derivatives, check_unused)
"""Checks that need a problem."""
NOT_RUN = {"offloaded-parameters", "fused-attention"}
"""Findings after which no pass is made: it would fail, or compile a kernel first."""
UNREADABLE = {"shuffled-data", "changing-data"}
"""Data of which the first batch, frozen, is looked at instead."""
EXPLAINING = {
    *("one-shot-data", "offloaded-parameters", "quantised-weights", "complex-parameters", "random-loss"),
    *("not-finite-values", "not-finite-output"),
}
"""Findings after which it is no wonder that a problem cannot be built."""


@as_found
def doctor(
    problem: Problem | nn.Module,
    data: Any = None,
    loss: Any = None,
    params: str | Iterable[str] | None = None,
    micro_batch: int | None = None,
) -> Report:
    """Look for all that would make a curvature wrong, meaningless or impossible, before anything long is computed.

    Give a problem; or what one is made of, so that what `Problem` would refuse becomes a finding beside others.
    A handful of passes over the first batch, or a few samples of it; of the data at most 64 batches are read, two or
    three times. Model, data and random numbers are left as they were; where dropout is active or torch.compile is on,
    the other checks look at the model as it is without.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)).double(), torch.ones(4, 2).double()
    >>> report = doctor(model, (x, x[:, :1]), MSE())
    >>> report.errors[0].name, report.errors[0].fix
    ('dropout-active', 'model.eval()')
    """
    if isinstance(problem, Problem):
        if not (data is None and loss is None and params is None and micro_batch is None):
            raise CurvlensError("doctor(problem) takes nothing else: data, loss and params are those of the problem.")
        own = copy.copy(problem)  # what a problem remembers of its passes stays as it is
        return _report(Patient(own.model, own.data.source, own.loss_function, own), lambda source: own)
    if not isinstance(problem, nn.Module):
        raise CurvlensError(
            f"doctor was given {a_kind(problem)}, expected a Problem or a torch.nn.Module: "
            "doctor(problem), or doctor(model, data, loss)."
        )
    if data is None or loss is None:
        missing = " and ".join(name for name, value in (("data", data), ("loss", loss)) if value is None)
        raise CurvlensError(f"doctor was given a model without {missing}: doctor(model, data, loss).")
    model = problem

    def build(source: Any) -> Problem:
        return Problem(model, source, loss, params, micro_batch=micro_batch)

    return _report(Patient(model, data, _loss(loss, model), None), build)


def _loss(loss: Any, model: nn.Module) -> Loss | None:
    try:
        return copy.copy(as_loss(loss)).for_model(model)
    except CurvlensError:
        return None  # a problem refuses it too, and says why


def _report(patient: Patient, build: Callable[[Any], Problem]) -> Report:
    def report() -> Report:
        with ExitStack() as stack:
            put_back = stack.enter_context(untouched(patient.model, patient.source))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what they say is in the findings
            return Report(_examine(patient, build, put_back, stack))

    # `catch_warnings`, made safe against Ctrl-C
    names = ("filters", "showwarning")
    as_before = map(setattr, repeat(warnings), names, [getattr(warnings, name) for name in names])
    return guarded((), partial(apart, patient.model, report), as_before)


def _examine(
    patient: Patient, build: Callable[[Any], Problem], put_back: Callable[[], None], stack: ExitStack
) -> Iterator[Finding]:
    """All findings, in the order of the checks."""
    found: list[Finding] = []
    given, patient.problem = patient.problem, None

    def names() -> set[str]:
        return {f.name for f in found}

    def make(checks: Iterable[Check], unless: Set[str] = frozenset()) -> None:
        for check in checks:
            if not names() & unless:
                found.extend(_guarded(check, patient))

    make(STILL)
    if "compiled-model" in names():
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    if not names() & NOT_RUN:
        patient.problem = given
        patient.admit()
        make([check_modes])
        put_back()  # a model that writes into itself is to be caught at it
    make([check_values, check_labels])
    refusal = None
    if not names() & {*NOT_RUN, "one-shot-data"}:
        frozen = [patient.batch] if names() & UNREADABLE and patient.batch is not None else patient.source
        try:
            patient.problem = build(frozen)
        except Exception as error:
            refusal = error
    if patient.runs:
        make(RUNNING, unless={"random-loss"})
        # Padding that takes part uses its row too: one finding is enough.
        make([check_embeddings], unless={"random-loss", "unmasked-padding", "counted-padding"})
        if patient.problem is not None:
            make(DERIVING, unless={*EXPLAINING, "gradient-checkpointing"})
    if refusal is not None and not names() & EXPLAINING:
        found.append(refused(refusal, patient))
    yield from found


def _guarded(check: Check, patient: Patient) -> list[Finding]:
    """What a check finds, up to its own failure if it has one."""
    found: list[Finding] = []
    try:
        found.extend(check(patient))
    except Exception as error:
        found.append(
            Finding(
                "check-failed",
                "warning",
                f"{check.__name__} itself failed: {type(error).__name__}: {str(error).strip()[:300]}",
                "What it looks for may be there or not.",
                "problem.loss(); problem.gradient()  # do these work?",
            )
        )
    return found
