"""Modules in training mode that make the loss random, couple the samples of a batch, or write into buffers."""

from __future__ import annotations

from collections.abc import Iterator

from curvlens.checks import active_batch_norms, active_dropouts, draws
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient, change
from curvlens.errors import listing

_SAME = 1e-6
"""Two passes that differ by less are the same: as `Problem` has it."""


def check_modes(patient: Patient) -> Iterator[Finding]:
    """Dropout, batch-norm and buffers that are written; ends with the model in evaluation mode if that is the cure."""
    dropping, norms = active_dropouts(patient.model), active_batch_norms(patient.model)
    spread, writes = _spread(patient), patient.writes()
    cured = False
    # Two passes with few draws may agree by chance; that random numbers were drawn is certain.
    if dropping and (spread is None or spread > _SAME or _draws(patient)):
        cured = True
        yield Finding(
            "dropout-active",
            "error",
            f"Dropout or stochastic depth is active in {listing(dropping)}.",
            "The loss is another one in every pass: no two products belong to the same matrix. The size is the "
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
            "It couples the samples of a batch, so the loss depends on how data is cut, and its statistics move with "
            "every pass. The size is the relative change of the loss by model.eval().",
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
            "Every pass is another function, and products drift. The size is the relative change of the loss from one "
            "pass to the next.",
            "model.eval()" if patient.model.training else "if self.training: ...  # around the line that writes",
            writes.drift,
        )
    elif written:
        yield Finding(
            "written-buffers",
            "note",
            f"The forward pass writes into buffers that the loss does not depend on: {listing(written)}.",
            "curvlens works on copies of them; results are not affected, and the model keeps its own.",
            "model.eval()  # if they are not to be computed at all",
        )
    if cured:  # the other checks look at the model as it will be
        patient.model.eval()
        spread = _spread(patient)
    if spread is not None and spread > _SAME and (cured or not dropping):
        yield Finding(
            "random-loss",
            "error",
            "Two passes over the same batch give two losses, and no module in training mode says that it drops.",
            "No two products belong to the same matrix. The size is the relative difference of the loss in two passes.",
            "if self.training: ...  # around the layer that draws (F.dropout(x, p, self.training), torch.randn); then "
            "model.eval()",
            spread,
        )


def _spread(patient: Patient) -> float | None:
    """How much the loss of the first samples differs between passes; None if there is nothing to pass."""
    if not patient.runs:
        return None
    # Three passes: rare drops (stochastic depth at a small rate) may leave two alike.
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
