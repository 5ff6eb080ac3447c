"""Heads seen in a forward pass: the views that cut what queries, keys and values are into (heads, width)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlens.blocks.entries import modules_around
from curvlens.blocks.heads import Count

Seen = Mapping[str, list[tuple[int, tuple[int, ...]]]]
"""By parameter, the views of what its module returned: the length of an axis, and what it was cut into."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _Splits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers how the outputs of some modules are viewed: all views of a tensor share its storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, str] = {}
        self._held: list[Tensor] = []
        """Outputs are kept to the end of the pass: freed storage would be used again under the same address."""
        self.found: dict[str, list[tuple[int, tuple[int, ...]]]] = {}

    def follow(self, name: str, output: Any) -> None:
        """Look at what becomes of an output."""
        if isinstance(output, Tensor):
            self._of[output.untyped_storage()._cdata] = name
            self._held.append(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _VIEWS and args[0].ndim:
            name = self._of.get(args[0].untyped_storage()._cdata)
            cut = _cut(tuple(args[0].shape), tuple(result.shape))
            if name is not None and cut is not None:
                self.found.setdefault(name, []).append((args[0].shape[-1], cut))
        return result


def _cut(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    """What the last axis was cut into; None if it was not."""
    for k in range(2, len(after)):
        if prod(after[-k:]) == before[-1] and prod(after[:-k]) == prod(before[:-1]):
            return after[-k:]
    return None


def watch(model: nn.Module, parameters: Iterable[str], run: Callable[[], object]) -> Seen:
    """Run a forward pass, and see how the outputs of the modules that own some parameters are viewed in it."""
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


def seen(splits: Seen, members: Mapping[str, tuple[int, bool]], outputs: int | None) -> Iterator[Count]:
    """The heads that all views agree on.

    ``members`` are the parameters of an attention, each with the length of its axis of heads and whether roles
    alternate along it; ``outputs`` is that length for the output projection, the same as for the queries.
    """
    pairs: dict[int, set[int]] = {}  # by length, into how many heads it was cut
    for name, (size, interleaved) in members.items():
        for length, cut in splits.get(name, ()):
            if interleaved:
                if length == size and (len(cut) == 2 or cut[1:2] == (3,)):
                    pairs.setdefault(size // 3, set()).add(cut[0])
            elif len(cut) == 2 and (length != size or 3 * (outputs or size) != size):
                pairs.setdefault(length, set()).add(cut[0])
            elif len(cut) == 3 and cut[0] == 3 and length == size:
                pairs.setdefault(length // 3, set()).add(cut[1])
    # With one token, a view of (tokens, length) looks like one head.
    heads = {length: counts - {1} or counts for length, counts in pairs.items()}
    queries = heads.pop(outputs if outputs in heads else max(heads, default=0), set())
    if len(queries) != 1 or any(len(counts) != 1 for counts in heads.values()):
        return
    keys = {n for counts in heads.values() for n in counts}
    if len(keys) <= 1:
        yield Count(queries.pop(), keys.pop() if keys else None)
