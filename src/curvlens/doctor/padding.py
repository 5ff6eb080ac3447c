"""Padding that takes part: in the attention of the tokens that count, or among the tokens that count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens.batches import Batch
from curvlens.doctor.finding import Finding
from curvlens.doctor.patient import FEW, Patient, change
from curvlens.errors import listing
from curvlens.losses import CausalLM
from curvlens.losses.cross_entropy import CrossEntropy

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative change of the loss below which padding does not take part; 0.05 in half precision."""


@dataclass(frozen=True)
class Text:
    """The tokens of a batch, and where they are padding."""

    tokens: Tensor
    mask: Tensor | None
    labels: Tensor | None
    padding: Tensor
    """Where a mask says so, or else where the tokens look like it."""
    known: bool
    """Whether the padding is that of the mask or of the configuration, and not a guess."""

    @property
    def declared(self) -> bool:
        """Whether a mask says where the padding is."""
        return self.mask is not None and bool((self.mask == 0).any())


def check_padding(patient: Patient) -> Iterator[Finding]:
    """Two measurements on the first batch: ignore padding in the labels, and cut it off."""
    text = text_of(patient)
    if text is None:
        return
    tolerance = TOLERANCE.get(next(patient.model.parameters()).dtype, 0.05)
    here, clean = patient.loss_of(patient.batch), patient.batch
    if isinstance(patient.loss, CrossEntropy):
        clean = without_padded_labels(patient, text, patient.loss.ignore_index)
        if clean is not None:
            counted = change(here, patient.loss_of(clean))
            if counted > tolerance:
                yield _counted(text, counted)
    if clean is None or text.declared or not bool(text.padding.any()):
        return
    leak = _leak(patient, clean, text.padding)
    if leak is not None and leak > tolerance:
        yield _unmasked(text, leak)


def _counted(text: Text, size: float) -> Finding:
    rows = _rows(text.padding) if bool(text.padding.any()) else "some samples"
    return Finding(
        "counted-padding",
        "error",
        f"Padding counts as labels: {rows} of the first batch.",
        "The loss averages over tokens nobody wrote, and so does its curvature. The size is the relative change of "
        "the loss.",
        "labels[attention_mask == 0] = -100  # for labels by themselves: labels[labels == pad_token_id] = -100",
        size,
    )


def _unmasked(text: Text, size: float) -> Finding:
    token = int(text.tokens[text.padding][0])
    guess = "" if text.known else " (a guess: it fills the ends of samples, without labels, and is nowhere else)"
    return Finding(
        "unmasked-padding",
        "error" if text.known else "warning",
        f"Token {token} pads {_rows(text.padding)} of the first batch{guess}, and no mask says so.",
        "Tokens that count look at the padding: loss and curvature depend on how long it is. The size is the relative "
        "change of the loss of these samples when it is cut off.",
        "batch['attention_mask'] = (batch['input_ids'] != pad_token_id).long()",
        size,
    )


def _rows(padding: Tensor) -> str:
    rows = padding.any(1).nonzero().flatten().tolist()
    return f"{int(padding.sum())} tokens in samples {listing(map(str, rows))}".replace("'", "")


def text_of(patient: Patient) -> Text | None:
    """The tokens of the first batch, if it is a text."""
    inputs, labels = batches.split_target(patient.batch)
    mapping = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    tokens, mask = mapping.get("input_ids"), mapping.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return None
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else None
    config = getattr(patient.model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    text = Text(tokens, mask, labels, torch.zeros_like(tokens, dtype=torch.bool), known=True)
    if text.declared:
        assert mask is not None
        return replace(text, padding=mask == 0)
    if "attention_mask" in mapping and mask is None:
        return text  # a mask of a kind of its own
    if isinstance(pad, int):
        speaks = pad in (_ids(config, "eos_token_id") | _ids(config, "bos_token_id"))
        return replace(text, padding=_ends(tokens == pad, keep=int(speaks)))
    guess = _guess(tokens, labels, getattr(patient.loss, "ignore_index", -100))
    return replace(text, padding=guess, known=False)


def _ids(config: Any, name: str) -> set[int]:
    value = getattr(config, name, None)
    return set(value) if isinstance(value, (list, tuple)) else {value} if isinstance(value, int) else set()


def _ends(same: Tensor, *, keep: int) -> Tensor:
    """Runs at the end of a row, or at its beginning; without the ``keep`` entries next to the text."""
    ends = torch.zeros_like(same)
    for flip in (False, True):
        run = (same.flip(1) if not flip else same).long().cumprod(1).bool()  # from the outside inwards
        if keep:
            inner = torch.cat([run[:, keep:], torch.zeros_like(run[:, :keep])], dim=1)
            run = run & inner
        ends |= run.flip(1) if not flip else run
    return ends


def _guess(tokens: Tensor, labels: Tensor | None, ignored: int) -> Tensor:
    """A token that fills the ends of rows, at least two of it, without labels there, and is nowhere else."""
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape or not tokens.numel():
        return nothing
    for token in sorted({*tokens[:, 0].tolist(), *tokens[:, -1].tolist()}):
        same = tokens == token
        run = _ends(same, keep=0)
        long = bool((run.sum(1) >= 2).any())
        if long and bool((same == run).all()) and bool((labels[run] == ignored).all()) and not bool(run.all()):
            return run
    return nothing


def without_padded_labels(patient: Patient, text: Text, ignored: int) -> Batch | None:
    """The batch with padding ignored in its labels; the batch itself if it is already, None if that cannot be said."""
    config = getattr(patient.model, "config", None)
    if text.labels is None:
        if not isinstance(patient.loss, CausalLM) or not patient.loss.shift:
            return None
        labels = text.tokens.masked_fill(text.padding, ignored)
        return {**_as_mapping(patient.batch), "labels": labels} if _is_mapping(patient) else (text.tokens, labels)
    if text.labels.is_floating_point():
        return patient.batch
    if text.labels.shape == text.tokens.shape and not getattr(config, "is_encoder_decoder", False):
        return _with_labels(patient.batch, text.labels.masked_fill(text.padding, ignored))
    pad = getattr(config, "pad_token_id", None)
    if text.labels.ndim == 2 and isinstance(pad, int):
        keep = int(pad in _ids(config, "eos_token_id"))
        return _with_labels(patient.batch, text.labels.masked_fill(_ends(text.labels == pad, keep=keep), ignored))
    return patient.batch


def _is_mapping(patient: Patient) -> bool:
    return isinstance(patient.batch, Mapping)


def _as_mapping(batch: Batch) -> dict[str, Any]:
    return {str(key): value for key, value in batch.items()}


def _with_labels(batch: Batch, labels: Tensor) -> Batch:
    if isinstance(batch, Mapping):
        key = next(key for key in batches.TARGET_KEYS if batch.get(key) is not None)
        return {**batch, key: labels}
    return (*batch[:-1], labels)


def _leak(patient: Patient, batch: Batch, padding: Tensor) -> float | None:
    """How much the loss of padded samples changes when each is cut to its own length; None if they cannot be cut."""
    if patient.loss is None or patient.loss.couples_batch or batches.batch_size(batch) is None:
        return None
    difference, total = 0.0, 0.0
    for row in padding.any(1).nonzero().flatten().tolist()[:FEW]:
        sample, kept = batches.rows(batch, row, row + 1), ~padding[row]
        try:
            short = batches.map_tensors(partial(_columns, kept=kept), sample)
            whole, cut = patient.sum_and_count(sample)[0], patient.sum_and_count(short)[0]
        except Exception:
            return None  # a model of one length only
        difference, total = difference + abs(whole - cut), total + abs(cut)
    return difference / total if total else 0.0


def _columns(x: Tensor, kept: Tensor) -> Tensor:
    """The kept positions of what has one entry, or vector, for each."""
    return x[:, kept] if x.ndim > 1 and x.shape[1] == len(kept) else x
