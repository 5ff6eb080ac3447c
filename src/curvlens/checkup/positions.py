"""Labels that are not shifted, and position numbers that count padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from curvlens import batches
from curvlens.batches import Batch
from curvlens.checkup.finding import Finding
from curvlens.checkup.padding import tolerance_of
from curvlens.checkup.patient import Patient, change
from curvlens.checkup.text import Text, text_of, with_labels
from curvlens.errors import listing
from curvlens.losses import CausalLM
from curvlens.losses.cross_entropy import CrossEntropy


def check_shift(patient: Patient) -> Iterator[Finding]:
    """Check that a causal model is not asked to predict the token it is given. If so, use ``losses.CausalLM()``."""
    loss = patient.loss
    if not isinstance(loss, CrossEntropy) or getattr(loss, "shift", False):
        return
    if type(loss).targets not in (CrossEntropy.targets, CausalLM.targets):
        return
    text = text_of(patient)
    if text is None or text.labels is None or text.labels.shape != text.tokens.shape or text.tokens.shape[1] < 2:
        return
    labels, ignored = text.labels, loss.ignore_index
    next_ones = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignored)], dim=1)
    if not _equal(labels, text.tokens, ignored) or _equal(next_ones, text.tokens, ignored):
        return
    if getattr(getattr(patient.model, "config", None), "is_encoder_decoder", False) or not _causal(patient, text):
        return
    here, there = (patient.loss_of(batch) for batch in (patient.batch, with_labels(patient.batch, next_ones)))
    yield Finding(
        "unshifted-labels",
        "error",
        "Each label equals the token at its own position, and the model is causal: it predicts a token that it is "
        "given.",
        f"The loss is {here:.4g}; the next-token loss is {there:.4g}. The size is the relative difference.",
        "losses.CausalLM()  # shifts the labels by itself",
        change(here, there),
    )


def _equal(labels: Tensor, tokens: Tensor, ignored: int) -> bool:
    """Whether each label that counts equals the token at its position."""
    counts = labels != ignored
    return bool(counts.any()) and bool((labels == tokens)[counts].all())


def _causal(patient: Patient, text: Text) -> bool:
    """Whether a different last token leaves the outputs before it unchanged."""
    assert patient.loss is not None
    loss, last = patient.loss, text.tokens[:, -1]
    others = text.tokens[text.tokens != last[0]]
    if not len(others):
        return False
    other = torch.where(last == others[0], last[0], others[0])
    changed = torch.cat([text.tokens[:, :-1], other[:, None]], dim=1)
    with torch.no_grad():
        first, second = (
            patient.run(lambda batch=batch: loss.outputs(patient.model, batch))  # type: ignore[misc]
            for batch in (patient.batch, _with_tokens(patient.batch, changed))
        )
    if not isinstance(first, Tensor) or first.shape[:2] != text.tokens.shape:
        return False
    early = (first[:, :-1] - second[:, :-1]).abs().max()
    return float(early) <= tolerance_of(patient) * float(first.abs().max())


def _with_tokens(batch: Batch, tokens: Tensor) -> Batch:
    return {**batch, "input_ids": tokens} if isinstance(batch, Mapping) else (tokens, *batch[1:])


def check_positions(patient: Patient) -> Iterator[Finding]:
    """Check that padding on the left does not shift the positions. If it does, pass ``position_ids``."""
    text, batch = text_of(patient), patient.batch
    if text is None or text.mask is None or not isinstance(batch, Mapping) or "position_ids" in batch:
        return
    left = (text.mask[:, 0] == 0) & (text.mask != 0).any(1)
    if not bool(left.any()):
        return
    positions = ((text.mask != 0).cumsum(1) - 1).clamp(min=0)
    try:
        here, there = (patient.loss_of(given) for given in (batch, {**batch, "position_ids": positions}))
        starts_at_zero = _starts_at_zero(patient, batch, text.mask, int(left.nonzero()[0]))
    except Exception:
        return  # the model takes no position_ids
    size = change(here, there)
    if size <= tolerance_of(patient) or not starts_at_zero:
        return
    rows = listing(map(str, left.nonzero().flatten().tolist())).replace("'", "")
    yield Finding(
        "padded-positions",
        "error",
        f"Samples {rows} of the first batch have padding before the text and no position_ids: the model counts "
        "positions from the first column, padding included.",
        "Padding changes the loss and the curvature of a text. The size is the relative change of the loss by the "
        "right positions.",
        "batch['position_ids'] = (batch['attention_mask'].cumsum(1) - 1).clamp(min=0)  # or padding_side='right'",
        size,
    )


def _starts_at_zero(patient: Patient, batch: Batch, mask: Tensor, row: int) -> bool:
    """Whether the model numbers the tokens of a sample without padding 0, 1, 2, …"""
    kept = mask[row] != 0

    def columns(x: Tensor) -> Tensor:
        return x[:, kept] if x.ndim > 1 and x.shape[1] == len(kept) else x

    short = batches.map_tensors(columns, batches.rows(batch, row, row + 1))
    counted = torch.arange(int(kept.sum()), device=mask.device)[None]
    sums = [patient.sum_and_count(given)[0] for given in (short, {**short, "position_ids": counted})]
    return change(sums[0], sums[1]) <= tolerance_of(patient)
