"""What the doctor looks at: a model, its loss and the first batch, with or without a problem that accepts them."""

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
from curvlens.batches import Batch
from curvlens.buffers import Writes, copies, writes
from curvlens.exchange import exchanged
from curvlens.losses import Loss
from curvlens.pieces import Piece
from curvlens.precision import KeepFloat64, is_float64
from curvlens.problem import Problem
from curvlens.sdpa import second_order
from curvlens.surroundings import Result

FEW = 4
"""How many samples go through the model, where any would do."""


class Patient:
    """A model, its data and its loss. Passes go through `run`, in the setting in which curvlens would do them."""

    def __init__(self, model: nn.Module, source: Any, loss: Loss | None, problem: Problem | None) -> None:
        self.model = model
        self.source = source
        self.loss = loss
        self.problem = problem
        self.batch: Batch | None = None
        """The first batch, a copy on the model's device; None if it cannot be had without using the data up."""
        self.coarse = False
        """Whether passes carry fewer digits than the parameters: float32 on the way, or autocast."""
        self.half = False
        """Whether they carry two or three: half precision on the way."""
        self.runs = False
        """Whether the loss of the first batch could be computed; what it is does not matter."""

    @property
    def batches(self) -> Iterable[Batch] | None:
        """The data as batches; None if it is none, or if a pass would use it up."""
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
        """Fetch the first batch and see whether the model runs on it."""
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
                return  # a problem for it cannot be built either, and its refusal says why
            self.runs = True

    def run(
        self, action: Callable[[], Result], *, twice: bool = False, buffers: Mapping[str, Tensor] | None = None
    ) -> Result:
        """Do something with the model, as curvlens would: ``twice`` for second derivatives."""
        if buffers is None:
            buffers = copies(self.model, dict(self.model.named_buffers()))
        if self.problem is not None:
            return self.problem.at(None, action, twice=twice, buffers=buffers)
        modes: list[TorchFunctionMode] = [second_order()] if twice else []
        if is_float64(self.model):
            modes.append(KeepFloat64())
        return exchanged(self.model, {}, action, modes, buffers)

    def sum_and_count(self, batch: Batch, *, twice: bool = False) -> tuple[float, float]:
        """The summed loss of a batch and its count, neither of them checked."""
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
        """Which buffers a pass over the first samples writes; none if there is nothing to pass."""
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
        """Some samples of the first batch, or all of it where it cannot be cut."""
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
        """One sample of the first batch in which something counts, or all of the batch where it cannot be cut."""
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
