"""Padding that changes the loss: real tokens attend to it, or its labels count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens.batches import Batch
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import FEW, Patient, change
from curvlens.checkup.text import Text, ends, ids_of, text_of, with_labels
from curvlens.errors import listing
from curvlens.losses import CausalLM
from curvlens.losses.cross_entropy import CrossEntropy
from curvlens.losses.language import both

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative change of the loss that counts as rounding; 0.05 in half precision."""


def check_padding(patient: Patient) -> Iterator[Finding]:
    """Check that the loss stays the same if padded labels are ignored, and if padding is cut off.

    If not, set padded labels to −100, or pass an ``attention_mask``.
    """
    text = text_of(patient)
    if text is None:
        return
    tolerance = tolerance_of(patient)
    here, clean = patient.loss_of(patient.batch), patient.batch
    counted, leak = 0.0, None
    if isinstance(patient.loss, CrossEntropy):
        clean = without_padded_labels(patient, text, patient.loss.ignore_index)
        if clean is not None:
            counted = change(here, patient.loss_of(clean))
    if clean is not None and not text.declared and bool(text.padding.any()):
        leak = when_cut(patient, clean, text.padding)
    if text.source == "eos":
        size = max(counted, leak or 0.0)
        if size > tolerance:
            yield _runs(text, size)
        return
    if counted > tolerance:
        yield _counted(text, counted)
    if leak is not None and leak > tolerance:
        yield _unmasked(patient, text, leak)


def tolerance_of(patient: Patient) -> float:
    """The relative change of the loss that counts as rounding, in the dtype of the model."""
    return _TOLERANCE.get(next(patient.model.parameters()).dtype, 0.05)


def _counted(text: Text, size: float) -> Finding:
    rows = _rows(text.padding) if bool(text.padding.any()) else "some samples"
    fix = "labels[attention_mask == 0] = -100  # without a mask: labels[labels == pad_token_id] = -100"
    if text.labels is not None and bool(text.padding[:, 0].any()):  # on the left
        fix = (
            "labels[attention_mask == 0] = -100; labels[:, 1:][attention_mask[:, :-1] == 0] = -100  # also ignores the "
            "first token of a text, which would be predicted from padding"
        )
    if text.labels is None:
        fix = text.mask_fix
    elif text.mask is None and text.labels.shape == text.tokens.shape and bool(text.padding.any()):
        token = int(text.tokens[text.padding][0])
        fix = f"labels[input_ids == {token}] = -100  # at the ends of samples; also pass an attention_mask"
    return Finding(
        "counted-padding",
        "error",
        f"Padding counts as labels: {rows} of the first batch.",
        "Loss and curvature average over padding. The size is the relative change of the loss.",
        fix,
        size,
    )


def _unmasked(patient: Patient, text: Text, size: float) -> Finding:
    token = int(text.tokens[text.padding][0])
    guess = {
        "guess": " (a guess: it occurs only at the ends of samples, without labels)",
        "table": " (the padding_idx of its embedding)",
    }.get(text.source, "")
    own = f"mask = tokens == {token}  # pass it to attention: TransformerEncoder(src_key_padding_mask=mask) in torch.nn"
    return Finding(
        "unmasked-padding",
        "error" if text.known else "warning",
        f"Token {token} is padding{guess} and is not masked: {_rows(text.padding)} of the first batch.",
        "Real tokens attend to the padding, so loss and curvature depend on its length. The size is the relative "
        "change of the loss of these samples when the padding is cut off.",
        text.mask_fix if isinstance(patient.batch, Mapping) else own,
        size,
    )


def _runs(text: Text, size: float) -> Finding:
    token = int(text.tokens[text.padding][0])
    return Finding(
        "eos-padding",
        "note",
        f"The end-of-text token {token} is repeated at the ends of samples: {_rows(text.padding)} of the first batch, "
        "not counting the first of each run. There is no attention_mask, and no pad_token_id in the configuration.",
        "If these tokens are padding, loss and curvature average over padding. If they belong to the text, nothing is "
        "wrong. The size is the relative change of the loss without them.",
        f"{text.mask_fix}  # if they are padding",
        size,
    )


def _rows(padding: Tensor) -> str:
    rows = padding.any(1).nonzero().flatten().tolist()
    return f"{int(padding.sum())} tokens in samples {listing(map(str, rows))}".replace("'", "")


def without_padded_labels(patient: Patient, text: Text, ignored: int) -> Batch | None:
    """The batch with padding ignored in its labels (perhaps unchanged). None if the labels are not known."""
    config = getattr(patient.model, "config", None)
    if text.labels is None:
        if not isinstance(patient.loss, CausalLM) or not patient.loss.shift:
            return None
        labels = text.tokens.where(both(~text.padding), ignored)
        return {**_as_mapping(patient.batch), "labels": labels} if _is_mapping(patient) else (text.tokens, labels)
    if text.labels.is_floating_point():
        return patient.batch
    if text.labels.shape == text.tokens.shape and not getattr(config, "is_encoder_decoder", False):
        shifts = isinstance(patient.loss, CausalLM) and patient.loss.shift
        keep = both(~text.padding) if shifts else ~text.padding
        return with_labels(patient.batch, text.labels.where(keep, ignored))
    pad = getattr(config, "pad_token_id", None)
    if text.labels.ndim == 2 and isinstance(pad, int):
        last = int(pad in ids_of(config, "eos_token_id"))
        return with_labels(patient.batch, text.labels.masked_fill(ends(text.labels == pad, keep=last), ignored))
    return patient.batch


def _is_mapping(patient: Patient) -> bool:
    return isinstance(patient.batch, Mapping)


def _as_mapping(batch: Batch) -> dict[str, Any]:
    return {str(key): value for key, value in batch.items()}


def when_cut(patient: Patient, batch: Batch, padding: Tensor) -> float | None:
    """The relative change of the loss when each padded sample is cut to its own length. None if that fails."""
    if patient.loss is None or patient.loss.couples_batch or batches.batch_size(batch) is None:
        return None
    difference, total = 0.0, 0.0
    for row in padding.any(1).nonzero().flatten().tolist()[:FEW]:
        sample, kept = batches.rows(batch, row, row + 1), ~padding[row]
        try:
            short = batches.map_tensors(partial(_columns, kept=kept), sample)
            whole, cut = patient.sum_and_count(sample)[0], patient.sum_and_count(short)[0]
        except Exception:
            return None  # the model takes one length only
        difference, total = difference + abs(whole - cut), total + abs(cut)
    return difference / total if total else 0.0


def _columns(x: Tensor, kept: Tensor) -> Tensor:
    """The kept positions of a tensor that has one column per position; other tensors unchanged."""
    return x[:, kept] if x.ndim > 1 and x.shape[1] == len(kept) else x
