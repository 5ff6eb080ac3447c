"""The losses of language models, equal to what Hugging Face computes from ``labels=``."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.errors import CurvlensError
from curvlens.losses.base import main_output
from curvlens.losses.cross_entropy import CrossEntropy


class MaskedLM(CrossEntropy):
    """Cross-entropy at the masked tokens. All others have the label −100, as for Hugging Face's ``labels=``."""

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits of the language model, called without its labels."""
        return language_model_logits(model, batch)


class CausalLM(CrossEntropy):
    """The next-token loss, equal to Hugging Face's ``labels=``: give unshifted labels, the loss shifts them.

    Without labels the targets are ``input_ids``, with −100 if ``attention_mask`` is 0 at the token or at the one before
    it: after padding on the left, nothing predicts the first token of a text. An encoder–decoder predicts its labels in
    place, without a shift. Use ``shift=False`` for labels that are already shifted.
    """

    def __init__(
        self,
        *,
        shift: bool = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.shift = shift

    def for_model(self, model: nn.Module) -> CausalLM:
        """An encoder–decoder predicts its labels in place: no shift."""
        if not self.shift or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return self
        in_place = copy.copy(self)
        in_place.shift = False
        return in_place

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits of the language model, called without its labels."""
        return language_model_logits(model, batch)

    def targets(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The next token for every position."""
        inputs, labels = batches.split_target(batch)
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        tokens = tokens if isinstance(tokens, Tensor) else None
        if not self.shift:
            return self._labels(batch)
        if labels is None:
            if tokens is None:
                return self._labels(batch)  # raises an error that says what is missing
            mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
            labels = tokens if mask is None or mask.ndim != 2 else tokens.where(both(mask != 0), self.ignore_index)
        elif _already_shifted(tokens, labels):
            raise CurvlensError(
                "The labels are the inputs shifted by one already, and CausalLM would shift them again. Use "
                "CausalLM(shift=False), or give unshifted labels, as for Hugging Face models."
            )
        end = labels.new_full((*labels.shape[:-1], 1), self.ignore_index)
        return torch.cat([labels[..., 1:], end], dim=-1)


def both(real: Tensor) -> Tensor:
    """Where both a token and the one before it are real, (…, L). The first token of a row is not predicted."""
    return real & torch.cat([torch.zeros_like(real[..., :1]), real[..., :-1]], -1)


def _already_shifted(tokens: Tensor | None, labels: Tensor) -> bool:
    """Whether ``labels[t]`` is ``tokens[t + 1]`` everywhere, and not ``tokens[t]``."""
    if tokens is None or tokens.shape != labels.shape or tokens.shape[-1] < 3 or tokens.is_floating_point():
        return False
    same = (labels[..., :-1] == tokens[..., 1:]) | (labels[..., :-1] < 0)
    return (
        bool(same.all()) and bool((labels[..., :-1] >= 0).any()) and not bool(((labels == tokens) | (labels < 0)).all())
    )


def language_model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Call a language model without its labels and without a cache; an encoder–decoder gets its decoder inputs."""
    inputs, labels = batches.split_target(batch)
    config = getattr(model, "config", None)
    extra: dict[str, Any] = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    if getattr(config, "is_encoder_decoder", False):
        inputs = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        inputs = {**inputs, "decoder_input_ids": decoder_inputs(model, inputs, labels)}
    logits = main_output(batches.call(model, inputs, **extra))
    assert isinstance(logits, Tensor)
    return logits


def decoder_inputs(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None) -> Tensor:
    """The decoder inputs in the batch, or the labels shifted right by the model's own rule."""
    given = inputs.get("decoder_input_ids")
    if isinstance(given, Tensor):
        return given
    if labels is None:
        raise CurvlensError(
            "An encoder-decoder model needs 'labels' (or 'decoder_input_ids' and 'labels') in the batch."
        )
    for rule in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        if hasattr(model, rule):
            shifted = getattr(model, rule)(labels.clone())  # FSMT's rule writes into its argument
            assert isinstance(shifted, Tensor)
            return shifted
    return _shifted_as_its_module_does(model, labels)


def _shifted_as_its_module_does(model: nn.Module, labels: Tensor) -> Tensor:
    """``shift_tokens_right`` of the model's Python module: Whisper, M2M100 and Blenderbot have no method for it."""
    for kind in (kind for module in model.modules() for kind in type(module).__mro__):
        shift = getattr(sys.modules.get(kind.__module__), "shift_tokens_right", None)
        if shift is not None:
            config: Any = model.config
            wanted = [name for name in inspect.signature(shift).parameters if hasattr(config, name)]
            shifted = shift(labels.clone(), **{name: getattr(config, name) for name in wanted})
            assert isinstance(shifted, Tensor)
            return shifted
    raise CurvlensError(
        f"{type(model).__name__} does not say how its decoder's inputs are made from the labels. Give both in the "
        "batch: 'decoder_input_ids' and 'labels'."
    )
