"""Exchanges a model's parameters and buffers for other tensors, for the duration of one action.

``torch.func.functional_call`` does this for a forward pass; `exchanged` does it for any action and is safe against
Ctrl-C at any moment. All threads see the exchange, so `lock_of` admits one thread at a time for each model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens.surroundings import Result, found, guarded, push

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

_PLAIN = (bool, int, float, str, tuple, type(None), Tensor)

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making_lock = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of a model. Hold it to exchange its parameters, or to rely on them."""
    with _making_lock:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def isolated(model: nn.Module, devices: Iterable[torch.device], *, draws: bool = True) -> Iterator[None]:
    """Hold the model's lock, switch inference mode off, and restore random generators afterwards.

    ``draws`` says whether random numbers may be drawn inside. Only then are the generators restored: all threads share
    them, and a thread that draws meanwhile would draw the same numbers again.
    An interrupt can stop this manager half-way, as any ``with``; `guarded`, around every public call, completes it.
    """
    cuda = [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
    generators = [torch.default_generator, *cuda] if draws else []
    put_back = map(torch.Generator.set_state, generators, [generator.get_state() for generator in generators])
    # Both managers are written in C: no signal can interrupt between them and the block.
    with lock_of(model), torch._C._InferenceMode(False):
        try:
            yield
        finally:
            deque(put_back, maxlen=0)


def exchanged(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    action: Callable[[], Result],
    modes: Sequence[TorchFunctionMode] = (),
    buffers: Mapping[str, Tensor] | None = None,
) -> Result:
    """Run ``action`` with the named parameters and buffers exchanged; tied ones under all their names.

    Afterwards the model holds its own tensors again, even if the action replaced buffers. Plain attributes beside the
    buffers are restored too, such as the length of a table that grows when needed.
    """
    given = {**tensors, **(buffers or {})}
    named = (*model.named_parameters(), *model.named_buffers())
    by_identity = {id(x): given[name] for name, x in named if name in given}
    holders, new, old = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    held, before = list[dict[str, Any]](), list[dict[str, Any]]()
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            own = {name: x for name, x in holder.items() if id(x) in by_identity}
            if own:
                holders.append(holder)
                old.append(own)
                new.append({name: by_identity[id(x)] for name, x in own.items()})
        if module._buffers and isinstance(module._buffers, dict):  # a scripted module has no dict here
            plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
            held += [module._buffers, vars(module)]
            before += [dict(module._buffers), plain]
    # Each of the two chains runs inside one call of C code, where Python handles no signal. Ctrl-C comes before or
    # after a chain, never inside it, and the second chain runs in either case.
    enter = chain(map(dict.update, holders, new), map(push, modes))
    return guarded(enter, action, chain(map(dict.update, holders, old), map(dict.update, held, before), found()))


def apart(model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run ``action``, which may register hooks and change the modes of modules, then restore both.

    Hooks go into copies of the modules' tables; afterwards the original tables are put back.
    """
    modules, copies, before = [], [], []
    for module in model.modules():
        tables: dict[str, Any] = {kind: vars(module)[kind] for kind in _HOOKS if kind in vars(module)}
        modules.append(vars(module))
        copies.append({kind: OrderedDict(table) for kind, table in tables.items()})
        before.append({**tables, "training": module.training})
    return guarded(map(dict.update, modules, copies), action, map(dict.update, modules, before))
