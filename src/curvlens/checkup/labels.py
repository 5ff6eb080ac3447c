"""Samples in which no token counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from curvlens.checkup.data import MOST
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import CurvlensError, listing
from curvlens.losses import CausalLM
from curvlens.losses.cross_entropy import CrossEntropy


def check_labels(patient: Patient) -> Iterator[Finding]:
    """Check that each sample has a label that counts, in at most `MOST` batches. If not, drop it or fix the labels."""
    loss = patient.loss
    if not isinstance(loss, CrossEntropy) or patient.batches is None:
        return
    if type(loss).targets not in (CrossEntropy.targets, CausalLM.targets):
        return  # a subclass may need the outputs for its targets
    idle, samples = [], 0
    for index, batch in enumerate(islice(iter(patient.batches), MOST)):
        try:
            targets = loss.targets(torch.empty(0), batch)
        except CurvlensError:
            return  # no labels, or labels shifted twice: `Problem` refuses them with a message
        if targets.is_floating_point() or not targets.ndim:
            return
        empty = _rows_without(targets, loss)
        samples += len(targets)
        idle += [f"{row} of batch {index}" for row in empty.nonzero().flatten().tolist()]
    if samples and len(idle) == samples:
        yield Finding(
            "nothing-counts",
            "error",
            f"No token of the data counts: the labels of all {samples} samples read are ignored.",
            "The loss is 0/0.",
            f"labels = input_ids.clone()  # {loss.ignore_index} only at positions that do not count",
            1.0,
        )
    elif idle:
        yield Finding(
            "uncounted-samples",
            "note",
            f"No token counts in {len(idle)} of {samples} samples: {listing(idle)}.".replace("'", ""),
            "These samples cost time and do not change the loss. The size is their share.",
            "data = [batch for batch in data if (batch['labels'] != -100).any()]  # and drop such samples in batches",
            len(idle) / samples,
        )


def _rows_without(targets: Tensor, loss: CrossEntropy) -> Tensor:
    """Which samples have no label that counts. Labels of classes with weight 0 do not count."""
    counts = targets != loss.ignore_index
    if loss.weight is not None:
        heavy = loss.weight.to(targets.device) > 0
        counts = counts & heavy[targets.long().clamp(0, len(heavy) - 1)]
    return ~counts.flatten(1).any(1) if targets.ndim > 1 else ~counts
