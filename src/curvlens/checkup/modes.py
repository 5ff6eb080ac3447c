"""Modules in training mode that make the loss random, couple the samples of a batch, or write into buffers."""

from __future__ import annotations

from collections.abc import Iterator

from curvlens._evaluation.checks import active_batch_norms, active_dropouts, draws
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient, change
from curvlens.errors import listing

_SAME = 1e-6
"""Two losses that differ by less count as equal, as in `Problem`."""


def check_modes(patient: Patient) -> Iterator[Finding]:
    """Check that passes are repeatable (no dropout, batch-norm, written buffers). If not, call ``model.eval()``.

    If that is the fix, the model stays in evaluation mode for the other checks.
    """
    dropping, norms = active_dropouts(patient.model), active_batch_norms(patient.model)
    spread, writes = _spread(patient), patient.writes()
    cured = False
    # Two passes with few dropped numbers may agree by chance, so also see whether the pass draws random numbers.
    if dropping and (spread is None or spread > _SAME or _draws(patient)):
        cured = True
        yield Finding(
            "dropout-active",
            "error",
            f"Dropout or stochastic depth is active in {listing(dropping)}.",
            "The loss differs from pass to pass, so no two products belong to the same matrix. The size is the "
            "relative difference of the loss in two passes.",
            "model.eval()",
            spread,
        )
    if norms:
        cured = True
        yield Finding(
            "batch-norm-training",
            "error",
            f"Batch-norm is in training mode: {listing(norms)}.",
            "It couples the samples of a batch, so the loss depends on how the data is cut into batches. Its "
            "statistics change with every pass. The size is the relative change of the loss by model.eval().",
            "model.eval()",
            _against_eval(patient),
        )
    written = [name for name in writes.names if name.rpartition(".")[0] not in norms]
    if written and writes.matters:
        cured = True
        yield Finding(
            "written-buffers",
            "error",
            f"The forward pass writes into buffers, and the loss depends on what it wrote: {listing(written)}.",
            "Every pass computes a different loss, and products drift. The size is the relative change of the loss "
            "from one pass to the next.",
            "model.eval()" if patient.model.training else "if self.training: ...  # around the line that writes",
            writes.drift,
        )
    elif written:
        yield Finding(
            "written-buffers",
            "note",
            f"The forward pass writes into buffers that the loss does not depend on: {listing(written)}.",
            "Results are not affected: curvlens works on copies, and the buffers of the model stay unchanged.",
            "model.eval()  # if you do not need them",
        )
    if cured:  # the other checks see the model with the fix applied
        patient.model.eval()
        spread = _spread(patient)
    if spread is not None and spread > _SAME and (cured or not dropping):
        yield Finding(
            "random-loss",
            "error",
            "Two passes over the same batch give different losses, and no dropout module is in training mode.",
            "No two products belong to the same matrix. The size is the relative difference of the loss in two passes.",
            "if self.training: ...  # around the layer that draws (F.dropout(x, p, self.training), torch.randn); then "
            "model.eval()",
            spread,
        )


def _spread(patient: Patient) -> float | None:
    """The largest relative difference of the loss over three passes. None if the model cannot run."""
    if not patient.runs:
        return None
    # Three passes: with rare drops (stochastic depth at a small rate) two may be equal.
    losses = [patient.loss_of(patient.few) for _ in range(3)]
    return max(change(loss, losses[0]) for loss in losses[1:])


def _draws(patient: Patient) -> bool:
    """Whether a pass takes numbers from the generator of the model's device."""
    return draws(next(patient.model.parameters()).device, lambda: patient.loss_of(patient.few))


def _against_eval(patient: Patient) -> float | None:
    if not patient.runs:
        return None
    modes = [(m, m.training) for m in patient.model.modules()]
    here = patient.loss_of(patient.batch)
    patient.model.eval()
    there = patient.loss_of(patient.batch)
    for module, training in modes:
        module.training = training
    return change(here, there)
