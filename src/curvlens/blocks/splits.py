"""Finds heads in a forward pass: the views that cut queries, keys and values into (heads, width)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlens.blocks.entries import modules_around
from curvlens.blocks.heads import Count


@dataclass
class View:
    """A view of the output of a module that cuts its last axis."""

    length: int
    """The length of the axis that was cut."""
    cut: tuple[int, ...]
    """The axes it was cut into."""
    strides: tuple[int, ...]
    """The strides of these axes. They identify an axis after a transposition."""
    moved: tuple[int, ...] | None = None
    """All strides after a later transposition; None if there was none."""

    def comes_first(self, axis: int) -> bool | None:
        """Whether a transposition brings an axis of the cut before the last one, as for heads. None if unknown."""
        if self.moved is None or self.strides[axis] not in self.moved or self.strides[-1] not in self.moved:
            return None
        return self.moved.index(self.strides[axis]) < self.moved.index(self.strides[-1])


Seen = Mapping[str, list[View]]
"""By parameter, the views of the output of its module."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_MOVES = (torch.ops.aten.permute.default, torch.ops.aten.transpose.int)


class _Splits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the views of the outputs of some modules. All views of a tensor share its storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, str] = {}
        self._held: list[Tensor] = []
        """Keeps outputs alive to the end of the pass: a freed storage could be reused at the same address."""
        self.found: dict[str, list[View]] = {}

    def follow(self, name: str, output: Any) -> None:
        """Record the views of an output."""
        if isinstance(output, Tensor):
            self._of[output.untyped_storage()._cdata] = name
            self._held.append(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _VIEWS and args[0].ndim:
            name = self._of.get(args[0].untyped_storage()._cdata)
            cut = _cut(tuple(args[0].shape), tuple(result.shape))
            if name is not None and cut is not None:
                view = View(args[0].shape[-1], cut, result.stride()[-len(cut) :])
                self.found.setdefault(name, []).append(view)
        elif func in _MOVES:
            name = self._of.get(args[0].untyped_storage()._cdata)
            for view in self.found.get(name, ()) if name is not None else ():
                if set(view.strides) <= {*result.stride(), *view.strides[1:-1]}:  # roles may have been taken apart
                    view.moved = tuple(result.stride())
        return result


def _cut(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes that the last axis was cut into; None if it was not cut."""
    for k in range(2, len(after)):
        if prod(after[-k:]) == before[-1] and prod(after[:-k]) == prod(before[:-1]):
            return after[-k:]
    return None


def watch(model: nn.Module, parameters: Iterable[str], run: Callable[[], object]) -> Seen:
    """Run a forward pass, and record the views of the outputs of the modules that own some parameters."""
    splits = _Splits()
    owners = {name: modules_around(model, name)[0] for name in parameters}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: splits.follow(name, output)

    handles = [module.register_forward_hook(hook(name)) for name, module in owners.items() if module is not model]
    try:
        with splits, torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return splits.found


def seen(splits: Seen, members: Mapping[str, tuple[int, bool]], outputs: int | None) -> Count | None:
    """The number of heads that all views agree on. None if they show none, or if the axis of heads is unclear.

    ``members`` are the parameters of an attention, each with the length of its axis of heads and whether roles
    alternate along it. ``outputs`` is that length for the output projection, which equals that of the queries.
    """
    pairs: dict[int, set[int]] = {}  # by length, into how many heads it was cut
    order = set()
    for length, view, axis in _read(splits, members, outputs):
        pairs.setdefault(length, set()).add(view.cut[axis])
        order.add(view.comes_first(axis))
    if True not in order or False in order:
        return None
    # With one token, a view as (tokens, length) looks like one head.
    heads = {length: counts - {1} or counts for length, counts in pairs.items()}
    queries = heads.pop(outputs if outputs in heads else max(heads, default=0), set())
    if len(queries) != 1 or any(len(counts) != 1 for counts in heads.values()):
        return None
    keys = {n for counts in heads.values() for n in counts}
    return Count(queries.pop(), keys.pop() if keys else None) if len(keys) <= 1 else None


def alternate(splits: Seen, members: Mapping[str, tuple[int, bool]], outputs: int | None) -> bool:
    """Whether a pass shows heads along the last axis, so that neighbouring entries belong to different heads."""
    return any(view.comes_first(axis) is False for _, view, axis in _read(splits, members, outputs))


def _read(
    splits: Seen, members: Mapping[str, tuple[int, bool]], outputs: int | None
) -> Iterator[tuple[int, View, int]]:
    """The views into heads: the length of one role, the view, and the axis of its cut that may be the heads."""
    for name, (size, interleaved) in members.items():
        for view in splits.get(name, ()):
            length, cut = view.length, view.cut
            if interleaved:
                if length == size and (len(cut) == 2 or cut[1:2] == (3,)):
                    yield size // 3, view, 0
            elif len(cut) == 2 and (length != size or 3 * (outputs or size) != size):
                yield length, view, 0
            elif len(cut) == 3 and cut[0] == 3 and length == size:
                yield length // 3, view, 1
