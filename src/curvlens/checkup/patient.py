"""The input of all checks: a model, its loss and the first batch, with or without a `Problem`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from curvlens import batches
from curvlens._evaluation.buffers import Writes, copies, writes
from curvlens._evaluation.exchange import exchanged
from curvlens._evaluation.pieces import Piece
from curvlens.batches import Batch
from curvlens.losses import Loss
from curvlens.precision import KeepFloat64, is_float64
from curvlens.problem import Problem
from curvlens.sdpa import second_order
from curvlens.surroundings import Result

FEW = 4
"""The number of samples for checks that do not need the whole batch."""


class Patient:
    """A model, its data and its loss. Checks call `run` for passes, which uses the same modes as a `Problem`."""

    def __init__(self, model: nn.Module, source: Any, loss: Loss | None, problem: Problem | None) -> None:
        self.model = model
        self.source = source
        self.loss = loss
        self.problem = problem
        self.batch: Batch | None = None
        """The first batch, a copy on the model's device. None if reading it would use up the data."""
        self.coarse = False
        """Whether passes have fewer digits than the parameters: they use float32 inside, or autocast."""
        self.half = False
        """Whether passes have only two or three digits: they use half precision inside."""
        self.runs = False
        """Whether the loss of the first batch could be computed. It may be NaN."""

    @property
    def batches(self) -> Iterable[Batch] | None:
        """The data as batches. None if it is not iterable, or if a pass would use it up."""
        if isinstance(self.source, (Tensor, Mapping, tuple)):
            return [self.source]
        return self.source if hasattr(self.source, "__iter__") and not self.one_shot else None

    @property
    def one_shot(self) -> bool:
        """Whether the data is its own iterator, so that a pass uses it up."""
        source = self.source
        if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
            source = source.dataset
        return hasattr(source, "__next__") and iter(source) is source

    def admit(self) -> None:
        """Fetch the first batch and check that the model runs on it (`runs`)."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self.batches is None or device.type == "meta":
            return
        first = next(iter(self.batches), None)
        if first is None or not batches.tensors(first):
            return
        self.batch = batches.to_device(first, device)
        if self.loss is not None:
            try:
                self.loss_of(self.batch)
            except Exception:
                return  # `Problem` fails too, and its message becomes a finding
            self.runs = True

    def run(
        self, action: Callable[[], Result], *, twice: bool = False, buffers: Mapping[str, Tensor] | None = None
    ) -> Result:
        """Call ``action`` in the modes that a `Problem` uses; ``twice`` adds those for second derivatives."""
        if buffers is None:
            buffers = copies(self.model, dict(self.model.named_buffers()))
        if self.problem is not None:
            return self.problem._evaluation.at(None, action, twice=twice, buffers=buffers)
        modes: list[TorchFunctionMode] = [second_order()] if twice else []
        if is_float64(self.model):
            modes.append(KeepFloat64())
        return exchanged(self.model, {}, action, modes, buffers)

    def sum_and_count(self, batch: Batch, *, twice: bool = False) -> tuple[float, float]:
        """The summed loss of a batch and its count, both unchecked."""
        assert self.loss is not None
        loss, copied = self.loss, batches.map_tensors(Tensor.clone, batch)

        def action() -> tuple[float, float]:
            total, count = loss.sum_and_count(loss.outputs(self.model, copied), copied)
            return float(total), float(count)

        with torch.no_grad():
            return self.run(action, twice=twice)

    def loss_of(self, batch: Batch, *, twice: bool = False) -> float:
        """The mean loss of a batch; NaN if nothing in it counts."""
        total, count = self.sum_and_count(batch, twice=twice)
        return total / count if count else math.nan

    def writes(self) -> Writes:
        """The buffers that a pass over the first samples writes; none if the model cannot run."""
        if not self.runs or self.loss is None:
            return Writes()
        loss, dtype = self.loss, next(self.model.parameters()).dtype

        def passed(buffers: Mapping[str, Tensor]) -> tuple[float, Mapping[str, Tensor]]:
            batch = batches.map_tensors(Tensor.clone, self.few)

            def action() -> tuple[float, Mapping[str, Tensor]]:
                total, _ = loss.sum_and_count(loss.outputs(self.model, batch), batch)
                return float(total), dict(self.model.named_buffers())

            with torch.no_grad():
                return self.run(action, buffers=buffers)

        return writes(self.model, passed, dtype)

    @cached_property
    def few(self) -> Batch:
        """The first `FEW` samples of the first batch, or the whole batch if it cannot be cut."""
        assert self.batch is not None
        size = batches.batch_size(self.batch)
        if size is None or size <= FEW or self.loss is None or self.loss.couples_batch:
            return self.batch
        cut = batches.rows(self.batch, 0, FEW)
        try:
            return cut if self.sum_and_count(cut)[1] else self.batch
        except Exception:
            return self.batch

    @cached_property
    def sample(self) -> Piece:
        """The first sample with a token that counts, or the whole batch if it cannot be cut."""
        for i in range(min(batches.batch_size(self.few) or 0, FEW)):
            if self.loss is None or self.loss.couples_batch:
                break
            one = batches.rows(self.few, i, i + 1)
            try:
                if self.sum_and_count(one)[1]:
                    return Piece(0, 0, 0, one)
            except Exception:
                break
        return Piece(0, 0, 0, self.few)


def change(value: float, reference: float) -> float:
    """|value − reference| relative to the reference."""
    if value == reference:
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-300)
