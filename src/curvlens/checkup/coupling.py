"""Samples that see what they should not: the masked tokens of their own, or the other samples of the batch."""

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
    """Other tokens where the mask says padding: nothing may change."""
    text = text_of(patient)
    if text is None or not text.declared or bool(text.padding.all()) or not isinstance(patient.batch, dict):
        return
    clean = patient.batch
    if isinstance(patient.loss, CrossEntropy):
        clean = without_padded_labels(patient, text, patient.loss.ignore_index) or patient.batch
    others, last = text.tokens[~text.padding], torch.ones_like(text.padding[:, :1])
    # A pad just before a text predicts its first token, in a language model, and is no business of the mask.
    places = text.padding & torch.cat([text.padding[:, 1:], last], dim=1)
    drawn = others[torch.arange(int(places.sum()), device=others.device) % len(others)]
    changed = {**clean, "input_ids": text.tokens.masked_scatter(places, drawn)}
    leak, tolerance = change(patient.loss_of(clean), patient.loss_of(changed)), tolerance_of(patient)
    if leak > tolerance:
        cut = when_cut(patient, clean, text.padding)
        if cut is not None and cut <= tolerance:
            return  # the ids of padding say where a text ends, as to classifiers with a decoder, and nothing more
        yield Finding(
            "ignored-mask",
            "error",
            "The loss of the tokens that count changes with the tokens that attention_mask declares as padding.",
            "The model takes the mask and does not use it: loss and curvature depend on the padding. The size is the "
            "relative change of the loss.",
            "scores.masked_fill(attention_mask[:, None, None, :] == 0, -torch.inf)  # in the model's attention",
            leak,
        )


def check_coupling(patient: Patient) -> Iterator[Finding]:
    """The first batch in two halves: their sums add up to that of the whole, or samples see each other."""
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
            "The first batch has another loss than its two halves together.",
            "The output of a sample depends on the others of its batch (statistics over the batch, as in batch-norm), "
            "so loss and curvature depend on how the data is cut. The size is the relative change of the loss.",
            "model.eval()  # and track_running_stats=True in batch-norms; no x - x.mean(0) over samples",
            size_of,
        )
