"""Measures how much memory a graph holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from curvlens._evaluation.checks import WRITTEN
from curvlens.errors import CurvlensError
from curvlens.surroundings import Result, guarded

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation

Built = TypeVar("Built", bound="Held")


class Held(Protocol):
    """An object that holds memory: a graph or a recording."""

    def tensors(self) -> list[Tensor]:
        """The tensors that it holds besides saved tensors."""
        ...


class OverBudgetError(Exception):
    """The graph under construction exceeds its budget."""


class Meter:
    """Counts the bytes that a graph saves for its backward passes, each storage once."""

    def __init__(self, model: nn.Module, limit: int | None) -> None:
        self.limit = limit
        self.bytes = 0
        owned = [*model.parameters(), *model.buffers()]
        self._owned = {p.untyped_storage()._cdata for p in owned}
        # A weak reference holds no memory, but prevents a new storage from getting the identity of a freed one.
        self._seen: dict[int, tuple[Any, int]] = {}

    def count(self, x: Tensor) -> Tensor:
        """Count a tensor, if its memory was not counted yet."""
        storage = x.untyped_storage() if x.layout == torch.strided else None
        if storage is not None and storage._cdata not in self._owned and storage._cdata not in self._seen:
            self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            self.bytes += storage.nbytes()
            if self.limit is not None and self.bytes > self.limit:
                raise OverBudgetError
        return x

    def _pack(self, x: Tensor) -> tuple[Tensor, int]:
        # Detached: a node that saves its own output would refer to itself and never be freed.
        kept = self.count(x).detach()
        return kept, kept._version

    def watch(self, action: Callable[[], Result]) -> Result:
        """Run an action and count the tensors that it saves and that still exist afterwards."""
        hooks = torch._C._autograd
        top = partial(hooks._top_saved_tensors_default_hooks, True)
        # As `torch.autograd.graph.saved_tensors_hooks`, but Ctrl-C cannot leave the hooks installed.
        result = guarded(
            starmap(hooks._push_saved_tensors_default_hooks, [(self._pack, _unpack)]),
            action,
            zip(iter(top, top()), starmap(hooks._pop_saved_tensors_default_hooks, repeat(())), strict=False),
        )
        self.bytes = sum(size for ref, size in self._seen.values() if not ref.expired())
        return result


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    """The saved tensor. Check that it was not written into, which torch does not do for custom hooks."""
    kept, version = saved
    if kept._version != version:
        raise CurvlensError(WRITTEN.format(f"Its shape is {tuple(kept.shape)}."))
    return kept


def built(evaluation: Evaluation, build: Callable[[], Built], limit: int | None) -> tuple[Built, int]:
    """Build a graph or a recording and count its bytes. Raise `OverBudgetError` beyond the limit."""
    meter = Meter(evaluation.model, limit)
    result = meter.watch(build)
    for x in result.tensors():
        meter.count(x)
    return result, meter.bytes
