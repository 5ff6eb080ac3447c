"""Token by token: right answers, and the tokens whose loss a step changes most; and parts of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens._evaluation.pieces import Piece
from curvlens.errors import CurvlensError
from curvlens.losses import CrossEntropy
from curvlens.problem import Problem

CONTEXT = 16
"""Tokens of the text that are shown before one."""


def accuracy(problem: Problem) -> float | None:
    """The share of counted tokens that the model gets right; None for a loss without classes."""
    if not isinstance(problem.loss_function, CrossEntropy):
        return None
    right = count = 0
    for _, losses, labels, guesses in _by_token(problem):
        counted = ~losses.isnan()
        right += int(((guesses == labels) & counted).sum())
        count += int(counted.sum())
    return right / count if count else None


def moved(problem: Problem, direction: Tensor, radius: float, most: int) -> Mapping[str, Any]:
    """The tokens whose loss changes most within ``radius`` along ± a unit vector.

    With l₊, l₋ the loss of a token at θ ± r u: the *bend* ½(l₊ + l₋) − l is its part of ½ r² uᵀHu and higher even
    terms, the *slope* ½(l₊ − l₋) its part of r gᵀu and higher odd ones. Tokens are sorted by |bend|.
    """
    if not isinstance(problem.loss_function, CrossEntropy):
        return {"tokens": [], "why": f"{type(problem.loss_function).__name__} has no loss for single tokens"}
    theta, u = problem.theta, direction / direction.norm()
    here = list(_by_token(problem))
    ahead, behind = (
        [losses for _, losses, _, _ in _by_token(problem.with_params(theta + sign * radius * u))] for sign in (1, -1)
    )
    found = []
    for (piece, losses, labels, _), plus, minus in zip(here, ahead, behind, strict=True):
        bend, slope = (plus + minus) / 2 - losses, (plus - minus) / 2
        sizes = bend.abs().nan_to_num(-1.0).flatten()
        ids = _ids(piece)
        for place in sizes.argsort(descending=True)[:most].tolist():
            if sizes[place] >= 0:
                found.append(_token(piece, place, ids, losses, labels, bend, slope))
    found.sort(key=lambda token: -abs(token["bend"]))
    return {"tokens": found[:most], "why": ""}


def part_of(problem: Problem, part: int, of: int) -> Problem:
    """The same problem on one of ``of`` parts of its samples, in their order."""
    total = n_samples(problem)
    start, stop = total * part // of, total * (part + 1) // of
    chosen, offset = [], 0
    for batch in problem.data.source:
        size = batches.batch_size(batch)
        if size is None:
            raise CurvlensError("The samples of a batch cannot be separated: its tensors have no first axis in common.")
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            chosen.append(batches.rows(batch, low, high))
        offset += size
    return Problem(
        problem.model, chosen, problem.loss_function, list(problem.layout.names), micro_batch=problem.micro_batch,
        memory=problem.memory // 4,
    )  # fmt: skip


def n_samples(problem: Problem) -> int:
    """Samples of all batches; a batch that cannot be cut counts as one."""
    return sum(batches.batch_size(batch) or 1 for batch in problem.data.source)


def _by_token(problem: Problem) -> Iterator[tuple[Piece, Tensor, Tensor, Tensor]]:
    """Losses, labels and guesses of all tokens, piece by piece, on the CPU."""
    evaluation, loss = problem._evaluation, problem.loss_function
    assert isinstance(loss, CrossEntropy)
    found = []

    def action(piece: Piece) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        def run() -> tuple[Tensor, Tensor, Tensor]:
            outputs = loss.outputs(problem.model, piece.batch)
            assert isinstance(outputs, Tensor)
            return loss.by_token(outputs, piece.batch)

        return run

    with torch.no_grad(), evaluation.isolated():
        for piece in evaluation.pieces():
            losses, labels, guesses = (x.detach().cpu() for x in evaluation.at(None, action(piece)))
            found.append((piece, losses, labels, guesses))
    yield from found


def _ids(piece: Piece) -> Tensor | None:
    """The token ids of a piece, (samples, positions), if it has any."""
    inputs, _ = batches.split_target(piece.batch)
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if isinstance(ids, (list, tuple)) and ids:
        ids = ids[0]
    whole = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids.cpu() if whole and isinstance(ids, Tensor) else None


def _token(
    piece: Piece, place: int, ids: Tensor | None, losses: Tensor, labels: Tensor, bend: Tensor, slope: Tensor
) -> dict[str, Any]:
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), losses.shape))
    position = at[-1] if len(at) > 1 else 0
    before: list[int] = []
    if ids is not None and len(at) == 2 and ids.shape == losses.shape:
        before = ids[at[0], max(0, position - CONTEXT + 1) : position + 1].tolist()
    return {
        "sample": piece.offset + at[0],
        "position": position,
        "label": int(labels[at]),
        "before": before,
        "loss": float(losses[at]),
        "bend": float(bend[at]),
        "slope": float(slope[at]),
    }
