"""Other tensors in the place of a model's parameters, for the duration of one action.

As ``torch.func.functional_call`` does it, but for any action and not only a forward pass; safe against Ctrl-C at any
moment; and, by `lock_of`, one thread at a time for each model, since the exchange is visible to all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Result = TypeVar("Result")

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making_lock = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of a model: who holds it may exchange its parameters, or rely on them."""
    with _making_lock:
        return _locks.setdefault(model, threading.RLock())


def exchanged(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    action: Callable[[], Result],
    modes: Sequence[TorchFunctionMode] = (),
) -> Result:
    """Run ``action`` with the named parameters exchanged, tied ones under all their names, and put them back."""
    by_identity = {id(p): tensors[name] for name, p in model.named_parameters() if name in tensors}
    holders, new, old = [], [], []
    for module in model.modules():
        own = {name: p for name, p in module._parameters.items() if id(p) in by_identity}
        if own:
            holders.append(module._parameters)
            old.append(own)
            new.append({name: by_identity[id(p)] for name, p in own.items()})
    # Each of the two loops runs inside one call of C code, where Python handles no signal: Ctrl-C comes before or
    # after it, but never in between, and the second one is reached from wherever it came.
    put, put_back = map(dict.update, holders, new), map(dict.update, holders, old)
    depth = torch._C._len_torch_function_stack()
    try:
        deque(put, maxlen=0)
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)
        return action()
    finally:
        deque(put_back, maxlen=0)
        # Not `with mode`: torch takes a mode off the stack while it handles a call, and Ctrl-C may come just then.
        while torch._C._len_torch_function_stack() > depth:
            torch._C._pop_torch_function_stack()
