"""The tokens of a batch, and which of them are padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.checkup.location import hooked
from curvlens.checkup.patient import Patient

Source = Literal["mask", "config", "table", "guess", "eos", "none"]


@dataclass(frozen=True)
class Text:
    """The tokens of a batch, and where they are padding."""

    tokens: Tensor
    mask: Tensor | None
    labels: Tensor | None
    padding: Tensor
    source: Source
    """How padding was found: by a mask, ``config.pad_token_id``, the ``padding_idx`` of the embedding, ignored labels
    at the ends of rows ("guess"), or a run of the end-of-text token ("eos")."""
    marks: bool = False
    """Whether the padding token also begins or ends a text. Then not all of its occurrences are padding."""

    @property
    def known(self) -> bool:
        """Whether the batch or the model declares the padding; otherwise it is a guess."""
        return self.source in ("mask", "config", "table")

    @property
    def declared(self) -> bool:
        """Whether there is a mask with zeros."""
        return self.mask is not None and bool((self.mask == 0).any())

    @property
    def mask_fix(self) -> str:
        """The line that adds a mask."""
        token = int(self.tokens[self.padding][0]) if bool(self.padding.any()) else "pad_token_id"
        by_tokenizer = "batch['attention_mask'] = tokenizer(texts, padding=True)['attention_mask']"
        own = f"batch['attention_mask'] = (batch['input_ids'] != {token}).long()"
        return by_tokenizer if self.marks else f"{own}  # or the mask of the tokenizer"


def text_of(patient: Patient) -> Text | None:
    """The tokens of the first batch. None if it has no token ids of shape (samples, tokens)."""
    inputs, labels = batches.split_target(patient.batch)
    mapping = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    tokens, mask = mapping.get("input_ids"), mapping.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return None
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else None
    labels = labels if isinstance(labels, Tensor) else None
    text = Text(tokens, mask, labels, torch.zeros_like(tokens, dtype=torch.bool), "none")
    if text.declared:
        assert mask is not None
        return replace(text, padding=mask == 0, source="mask")
    if "attention_mask" in mapping and mask is None:
        return text  # a mask of another shape; what it hides is not known
    config = getattr(patient.model, "config", None)
    marks = ids_of(config, "eos_token_id") | ids_of(config, "bos_token_id")
    said: tuple[tuple[Source, int | None], ...] = (
        ("config", getattr(config, "pad_token_id", None)),
        ("table", _of_the_table(patient, tokens)),
    )
    for source, pad in said:
        if isinstance(pad, int):
            padding = ends(tokens == pad, keep=int(pad in marks))
            return replace(text, padding=padding, source=source, marks=pad in marks)
    guess = _guess(tokens, labels, getattr(patient.loss, "ignore_index", -100))
    if bool(guess.any()):
        return replace(text, padding=guess, source="guess")
    for eos in sorted(ids_of(config, "eos_token_id")) if mask is None else ():
        run = ends(tokens == eos, keep=1)
        if bool(run.any()):
            return replace(text, padding=run, source="eos", marks=True)
    return text


def _of_the_table(patient: Patient, tokens: Tensor) -> int | None:
    """The ``padding_idx`` of the embedding that looks up the tokens."""
    found: list[int] = []

    def look(name: str, module: nn.Module, given: list[Tensor]) -> None:
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            found.extend(module.padding_idx for x in given if x.shape == tokens.shape and torch.equal(x, tokens))

    if any(isinstance(m, nn.Embedding) and m.padding_idx is not None for m in patient.model.modules()):
        with hooked(patient.model, inputs=look):
            patient.loss_of(patient.batch)
    return found[0] if found else None


def ids_of(config: Any, name: str) -> set[int]:
    """The ids of a special token. A configuration has none, one or several."""
    value = getattr(config, name, None)
    return set(value) if isinstance(value, (list, tuple)) else {value} if isinstance(value, int) else set()


def ends(same: Tensor, *, keep: int) -> Tensor:
    """Runs of True at both ends of a row, without the ``keep`` entries next to the text."""
    found = torch.zeros_like(same)
    for flip in (False, True):
        run = (same.flip(1) if not flip else same).long().cumprod(1).bool()  # from the outside inwards
        if keep:
            inner = torch.cat([run[:, keep:], torch.zeros_like(run[:, :keep])], dim=1)
            run = run & inner
        found |= run.flip(1) if not flip else run
    return found


def _guess(tokens: Tensor, labels: Tensor | None, ignored: int) -> Tensor:
    """Guess the padding: a token without labels, at least twice at an end of a row, and nowhere else."""
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape or not tokens.numel():
        return nothing
    for token in sorted({*tokens[:, 0].tolist(), *tokens[:, -1].tolist()}):
        same = tokens == token
        run = ends(same, keep=0)
        long = bool((run.sum(1) >= 2).any())
        if long and bool((same == run).all()) and bool((labels[run] == ignored).all()) and not bool(run.all()):
            return run
    return nothing


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """The batch with other labels."""
    if isinstance(batch, Mapping):
        key = next(key for key in batches.TARGET_KEYS if batch.get(key) is not None)
        return {**batch, key: labels}
    return (*batch[:-1], labels)
