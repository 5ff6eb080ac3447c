"""Restores model, data and random states after the checks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlens._evaluation.exchange import isolated
from curvlens.checksum import same_bits

Step = Callable[[], object]
"""Restores one thing."""


@contextmanager
def untouched(model: nn.Module, source: object) -> Iterator[Callable[[], None]]:
    """Restore random states, buffers, parameters and training modes at the end of the block.

    Yields a function that restores the tensors of the model immediately.
    """
    cuda = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - data sets draw from it
    with isolated(model, cuda):
        modes: list[Step] = [partial(setattr, module, "training", module.training) for module in model.modules()]
        tensors: list[Step] = [*_held(model), *_tensors(model)]
        undo = [*modes, *tensors, *_generators(source)]
        try:
            yield lambda: _all(tensors)
        finally:
            _all(undo)
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002


def _all(steps: Iterable[Step]) -> None:
    for step in steps:
        step()


def _held(model: nn.Module) -> Iterator[Step]:
    """Steps that restore which tensor each module holds under which name."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            yield partial(_refill, held, dict(held))


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    if list(held) != list(before) or any(held[name] is not before[name] for name in before):
        held.clear()
        held.update(before)


def _tensors(model: nn.Module) -> Iterator[Step]:
    """Steps that restore the values of parameters and buffers. A layer may write into them, as batch-norm does."""
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type != "meta":
            yield partial(_rewrite, x, x.detach().clone())


def _rewrite(x: Tensor, before: Tensor) -> None:
    if not same_bits(x, before):
        x.data.copy_(before)


def _generators(source: object) -> Iterator[Step]:
    """Steps that restore the random generators of a loader, its sampler and its data set."""
    sampler = getattr(source, "sampler", None)
    dataset = getattr(source, "dataset", None)
    seen: set[int] = set()
    for holder in (source, sampler, dataset, getattr(source, "batch_sampler", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Generator):
                yield partial(value.set_state, value.get_state())
            elif isinstance(value, np.random.Generator):
                yield partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
            elif isinstance(value, random.Random):
                yield partial(value.setstate, value.getstate())
