"""Other tensors in the place of a model's parameters and buffers, for the duration of one action.

As ``torch.func.functional_call`` does it, but for any action and not only a forward pass; safe against Ctrl-C at any
moment; and, by `lock_of`, one thread at a time for each model, since the exchange is visible to all of them.
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
    """The lock of a model: who holds it may exchange its parameters, or rely on them."""
    with _making_lock:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def isolated(model: nn.Module, devices: Iterable[torch.device], *, draws: bool = True) -> Iterator[None]:
    """One thread at a time, outside of inference mode, random numbers left alone.

    ``draws`` says whether random numbers may be drawn inside. Only then are the generators put back: all threads share
    them, and another one that draws meanwhile would draw the same numbers again.
    An interrupt may leave it half-way, as any ``with``; then `guarded`, around every public call, ends it.
    """
    cuda = [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
    generators = [torch.default_generator, *cuda] if draws else []
    put_back = map(torch.Generator.set_state, generators, [generator.get_state() for generator in generators])
    # Both managers are written in C: no signal falls between them and the block.
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
    """Run ``action`` with the named parameters and buffers exchanged, tied ones under all their names.

    Afterwards the model holds what it held before, also if the action has put other buffers there; so do the numbers
    and tensors beside them, such as the length of a table that is made longer when it is needed.
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
        if module._buffers and isinstance(module._buffers, dict):  # that of a scripted module is none
            plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
            held += [module._buffers, vars(module)]
            before += [dict(module._buffers), plain]
    # Each of the two chains runs inside one call of C code, where Python handles no signal: Ctrl-C comes before or
    # after it, but never in between, and the second one is reached from wherever it came.
    enter = chain(map(dict.update, holders, new), map(push, modes))
    return guarded(enter, action, chain(map(dict.update, holders, old), map(dict.update, held, before), found()))


def apart(model: nn.Module, action: Callable[[], Result]) -> Result:
    """Run ``action`` where hooks may be registered and modes of modules changed: all are as before afterwards.

    Hooks go into copies of the modules' tables, and the tables themselves are put back.
    """
    modules, copies, before = [], [], []
    for module in model.modules():
        tables: dict[str, Any] = {kind: vars(module)[kind] for kind in _HOOKS if kind in vars(module)}
        modules.append(vars(module))
        copies.append({kind: OrderedDict(table) for kind, table in tables.items()})
        before.append({**tables, "training": module.training})
    return guarded(map(dict.update, modules, copies), action, map(dict.update, modules, before))
