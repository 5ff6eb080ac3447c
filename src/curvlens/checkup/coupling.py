"""Losses that depend on masked tokens, or on the other samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from curvlens import batches
from curvlens.checkup.finding import Finding
from curvlens.checkup.padding import tolerance_of, when_cut, without_padded_labels
from curvlens.checkup.patient import Patient, change
from curvlens.checkup.text import text_of
from curvlens.losses.cross_entropy import CrossEntropy


def check_mask(patient: Patient) -> Iterator[Finding]:
    """Replace the padded tokens and check that the loss stays the same. If not, use the mask in the attention."""
    text = text_of(patient)
    if text is None or not text.declared or bool(text.padding.all()) or not isinstance(patient.batch, dict):
        return
    clean = patient.batch
    if isinstance(patient.loss, CrossEntropy):
        clean = without_padded_labels(patient, text, patient.loss.ignore_index) or patient.batch
    others, last = text.tokens[~text.padding], torch.ones_like(text.padding[:, :1])
    # In a language model the pad just before a text predicts its first token. The mask does not cover that position.
    places = text.padding & torch.cat([text.padding[:, 1:], last], dim=1)
    drawn = others[torch.arange(int(places.sum()), device=others.device) % len(others)]
    changed = {**clean, "input_ids": text.tokens.masked_scatter(places, drawn)}
    leak, tolerance = change(patient.loss_of(clean), patient.loss_of(changed)), tolerance_of(patient)
    if leak > tolerance:
        cut = when_cut(patient, clean, text.padding)
        if cut is not None and cut <= tolerance:
            return  # the model finds the end of a text by its padding ids, as classifiers with a decoder do
        yield Finding(
            "ignored-mask",
            "error",
            "The loss changes when other tokens stand where attention_mask is 0.",
            "The model takes the mask but does not use it, so loss and curvature depend on the padding. The size is "
            "the relative change of the loss.",
            "scores.masked_fill(attention_mask[:, None, None, :] == 0, -torch.inf)  # in the model's attention",
            leak,
        )


def check_coupling(patient: Patient) -> Iterator[Finding]:
    """Check that the loss of the first batch is the sum over its two halves. If not, call ``model.eval()``."""
    loss, batch = patient.loss, patient.batch
    size = None if batch is None else batches.batch_size(batch)
    if loss is None or loss.couples_batch or size is None or size < 2:
        return
    halves = [batches.rows(batch, 0, size // 2), batches.rows(batch, size // 2, size)]
    whole, parts = patient.sum_and_count(batch)[0], sum(patient.sum_and_count(half)[0] for half in halves)
    size_of = change(whole, parts)
    if size_of > tolerance_of(patient):
        yield Finding(
            "coupled-samples",
            "error",
            "The loss of the first batch is not the sum of the losses of its two halves.",
            "The output of a sample depends on the other samples of its batch (as in batch-norm), so loss and "
            "curvature depend on how the data is cut into batches. The size is the relative change of the loss.",
            "model.eval()  # and track_running_stats=True in batch-norms; no x - x.mean(0) over samples",
            size_of,
        )
