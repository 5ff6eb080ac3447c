"""A finding for an error of `Problem`, with the cause and a fix where they are known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.checkup.finding import Finding
from curvlens.checkup.location import hooked
from curvlens.checkup.patient import Patient
from curvlens.errors import CurvlensError
from curvlens.losses import CausalLM
from curvlens.losses.cross_entropy import CrossEntropy


def refused(error: Exception, patient: Patient) -> Finding:
    """The finding for an error of `Problem`."""
    text = str(error) if isinstance(error, CurvlensError) else f"{type(error).__name__}: {error}"
    cause, fix = _cause(text, patient) or ("", "Problem(model, data, loss)  # with the change named above")
    return Finding("refused", "error", f"Problem cannot be built: {cause}{text}", "Nothing can be computed.", fix)


def _cause(text: str, patient: Patient) -> tuple[str, str] | None:
    """The cause of an error and the line that fixes it. None if the cause is not known."""
    config = getattr(patient.model, "config", None)
    if "mat_a to be" in text or "grouped_mm" in text:
        return (
            "the kernel of the experts (grouped_mm) has no float64. torch said: ",
            "AutoModelForCausalLM.from_pretrained(name, experts_implementation='eager').double()",
        )
    loss = patient.loss
    if getattr(config, "is_encoder_decoder", False) and isinstance(loss, CrossEntropy):
        if not isinstance(loss, CausalLM):
            return (
                f"the model is an encoder-decoder, and {type(loss).__name__} gives its decoder no input. The error: ",
                "losses.CausalLM()  # makes the decoder's inputs from the labels",
            )
        return None
    return _outside(patient) or _too_long(patient)


def _outside(patient: Patient) -> tuple[str, str] | None:
    """The first embedding that gets an index beyond its rows: a token id, or a position."""
    found: list[tuple[str, str]] = []
    given = [x for x in batches.tensors(patient.batch) if not x.is_floating_point()]

    def look(name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        if not isinstance(module, nn.Embedding) or found or not tensors or not tensors[0].numel():
            return
        ids, rows = tensors[0], module.num_embeddings
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < rows:
            return
        if any(x.shape == ids.shape and torch.equal(x, ids) for x in given):
            what = f"ids run from {low} to {high}, but {name!r} has {rows} rows, for ids from 0 to {rows - 1}. "
            fix = "model.resize_token_embeddings(len(tokenizer))  # or use the tokenizer of the model"
        else:
            what = f"sequences of {ids.shape[-1]} tokens are longer than the {rows} positions of {name!r}. "
            fix = f"input_ids = input_ids[:, :{rows}]  # cut masks and labels in the same way"
        found.append((f"{what}torch said: ", fix))

    if patient.batch is not None and patient.loss is not None:
        try:
            with hooked(patient.model, inputs=look):
                patient.loss_of(patient.batch)
        except Exception:
            return found[0] if found else None
    return None


def _too_long(patient: Patient) -> tuple[str, str] | None:
    """Sequences longer than ``config.max_position_embeddings``, for models without an embedding of positions."""
    most = getattr(getattr(patient.model, "config", None), "max_position_embeddings", None)
    tokens = [x for x in batches.tensors(patient.batch) if x.ndim == 2 and not x.is_floating_point()]
    if not isinstance(most, int) or not tokens or tokens[0].shape[1] <= most or patient.runs:
        return None
    return (
        f"sequences of {tokens[0].shape[1]} tokens are longer than the {most} positions of the model. torch said: ",
        f"input_ids = input_ids[:, :{most}]  # cut masks and labels in the same way",
    )
