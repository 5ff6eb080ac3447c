"""Checks made with the first batch, before any long work: is the loss one fixed function of the model?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from curvlens import batches
from curvlens._evaluation.buffers import writes
from curvlens._evaluation.checks import (
    check_batch_norm,
    check_buffers,
    check_deterministic,
    check_split,
    explained_batch,
    loss_through_outputs,
    rng_state,
    warn_low_precision,
)
from curvlens._evaluation.exchange import isolated
from curvlens._evaluation.pieces import Piece
from curvlens.checksum import checksum
from curvlens.errors import CurvlensError
from curvlens.losses import FromModel

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation

__all__ = ["Checked", "check", "check_attention", "check_cut", "check_weights", "warn_low_precision"]


class FirstLoss(NamedTuple):
    """The summed loss of the first piece, as computed when the setting was checked."""

    place: tuple[int, int, int | None]
    state: tuple[Any, ...]
    total: float
    tokens: float


@dataclass
class Checked:
    """The results of the checks of one evaluation so far."""

    modes: frozenset[tuple[bool, ...]] = frozenset()
    """The training modes of the modules for which the setting was checked."""
    written: tuple[str, ...] = ()
    """Buffers that a pass writes, in any of these modes."""
    draws: bool = True
    """Whether a pass over the data or the model draws random numbers; True until the first pass shows otherwise."""
    coarsest: torch.dtype | None = None
    """The lowest precision inside a forward pass; None before the first pass."""
    cut: bool = False
    """Whether a check has shown that cutting a batch does not change its loss."""
    first_loss: FirstLoss | None = None
    attention_replaced: bool = False
    attention: bool = False
    """Whether the replacement of attention was compared with the model's own."""
    lone_number: bool = False
    """Whether the user's loss returns one number without a count."""
    unused_said: bool = False


def check(evaluation: Evaluation) -> None:
    """Check the setting with the first batch before any long work, and again when modules change their mode."""
    modes = tuple(m.training for m in evaluation.model.modules())
    if modes in evaluation.checked.modes:
        return
    with isolated(evaluation.model, [evaluation.device]):
        _check_modes(evaluation, modes)


def _check_modes(evaluation: Evaluation, modes: tuple[bool, ...]) -> None:
    model, checked, data = evaluation.model, evaluation.checked, evaluation.data
    check_batch_norm(model)
    piece = Piece(0, 0, 0, batches.to_device(data.first(), evaluation.device))
    if piece.size == 0:  # `Evaluation.pieces` skips empty batches
        filled = next((batch for batch in data.source if batches.batch_size(batch) != 0), None)
        if filled is None:
            return
        piece = Piece(0, 0, 0, batches.to_device(filled, evaluation.device))
    with explained_batch(piece.batch, evaluation.dtype, model, evaluation.loss_function):
        small = piece.split(evaluation.micro_batch)[0] if evaluation.micro_batch is not None and piece.size else piece
        before = checksum(model.parameters())
        copied = dataclasses.replace(small, batch=batches.map_tensors(Tensor.clone, small.batch))
        written = check_buffers(writes(model, partial(_passed_with, evaluation, copied), evaluation.dtype))
        checked.written = tuple({**dict.fromkeys(checked.written), **dict.fromkeys(written)})  # of all modes so far
        if evaluation.micro_batch is not None and piece.size != 0:
            check_cut(evaluation, piece)
            piece = small
        random = rng_state(evaluation.device)
        total, count = check_deterministic(model, partial(_passed_apart, evaluation), evaluation.passed, piece)
        checked.draws |= not torch.equal(random, rng_state(evaluation.device))
        if before != checksum(model.parameters()):
            raise CurvlensError(
                "The forward pass writes into the parameters (an Embedding with max_norm?), so there is no fixed point "
                "for derivatives. Switch that off, as with embedding.max_norm = None."
            )
    checked.first_loss = FirstLoss(piece.place, _state(evaluation), float(total), count)
    checked.modes |= {modes}


def check_cut(evaluation: Evaluation, piece: Piece) -> None:
    """Check, once, that cutting a batch along its first axis does not change its loss."""
    checked = evaluation.checked
    if evaluation.loss_function.couples_batch:
        raise CurvlensError(
            f"{evaluation.loss_function!r} couples the samples of a batch, so a batch cannot be cut. Leave micro_batch "
            "out."
        )
    if checked.cut and piece.size is not None:
        return
    try:
        if checked.coarsest is None:
            evaluation.passed(piece)
        check_split(evaluation.passed, piece, checked.coarsest or evaluation.dtype)
    except CurvlensError:
        check_weights(evaluation, several=True)
        raise
    checked.cut = (piece.size or 0) > 1


def check_weights(evaluation: Evaluation, *, several: bool) -> None:
    """Raise an error if a loss without a count meets several pieces: their mean is unknown."""
    if several and evaluation.checked.lone_number:
        raise CurvlensError(
            "The loss returns one number, and the data comes in several pieces: how to weigh them is unknown. Return "
            "(sum, count) from the loss, or give one batch and leave micro_batch out."
        )


def check_attention(evaluation: Evaluation, piece: Piece, total: float) -> None:
    """Check, once, that the summed loss of a piece is the same with the model's own attention."""
    checked = evaluation.checked
    if not checked.attention_replaced or checked.attention:
        return
    checked.attention = True
    own, count = _own_loss(evaluation, piece)
    # rounding of a sum of losses, each of size about 1
    allowed = min(1e4 * torch.finfo(checked.coarsest or evaluation.dtype).eps, 0.1) * (abs(own) + count)
    if not abs(own - total) <= allowed:
        raise CurvlensError(
            f"The summed loss of the first data is {own:.6g} with the model's own attention and {total:.6g} with the "
            "attention that can be differentiated twice: they are not the same function. In Hugging Face models, call "
            "model.set_attn_implementation('eager')."
        )


def _own_loss(evaluation: Evaluation, piece: Piece) -> tuple[float, float]:
    """The summed loss of a piece and its count with the model's own attention; computed if not known."""
    known = evaluation.checked.first_loss
    if known is not None and known.place == piece.place and known.state == _state(evaluation):
        return known.total, known.tokens
    with torch.no_grad():
        own, count = evaluation.passed(piece)
    return own.item(), count


def _state(evaluation: Evaluation) -> tuple[Any, ...]:
    """A short signature of everything that the loss depends on besides the data."""
    point = [] if evaluation.theta is None else [evaluation.theta]
    device = evaluation.device.type
    cast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (cast, tuple(m.training for m in evaluation.model.modules()), checksum([*evaluation.moving(), *point]))


def _passed_with(
    evaluation: Evaluation, piece: Piece, buffers: Mapping[str, Tensor]
) -> tuple[float, Mapping[str, Tensor]]:
    """The summed loss of a piece with the given buffers, and the buffers that the model holds after the pass."""

    def action() -> tuple[float, Mapping[str, Tensor]]:
        outputs = evaluation.loss_function.outputs(evaluation.model, piece.batch)
        total, _ = evaluation.sum_and_count(outputs, piece)
        return float(total), dict(evaluation.model.named_buffers())

    with torch.no_grad():
        return evaluation.at(None, action, buffers=buffers)


def _passed_apart(evaluation: Evaluation, piece: Piece) -> tuple[Tensor, float]:
    """As `Evaluation.passed`. Raise an error if the loss depends on parameters beside the outputs."""
    loss = evaluation.loss_function
    if isinstance(loss, FromModel):
        return evaluation.passed(piece)
    return evaluation.at(None, lambda: loss_through_outputs(loss, evaluation.model, evaluation.sum_and_count, piece))
