"""Torch's global states (modes, gradients, autocast), restored after every call, even after Ctrl-C.

Python handles a signal when a Python function begins and when a C function ends. So Ctrl-C can leave a ``with``
between the change that its manager makes and the block that undoes it: ``torch.no_grad`` stays on, or a mode that
torch has taken off its stack is lost. A generator that should restore it does so only when the traceback is freed,
perhaps long after. Here the states are noted first and restored by one call of C code, where no signal is handled.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, nullcontext, suppress
from functools import wraps
from itertools import chain, repeat, starmap
from pathlib import Path
from types import GeneratorType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

_depth, _pop, push = (
    torch._C._len_torch_function_stack,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)
_dispatch_depth, _dispatch_pop, _dispatch_push = (
    torch._C._len_torch_dispatch_stack,
    torch._C._pop_torch_dispatch_stack,
    torch._C._push_on_torch_dispatch_stack,
)
_MANAGERS = {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}
_OURS = str(Path(__file__).parent)
_CASTING = tuple(device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device))


def found() -> Iterator[object]:
    """Steps of C code that restore the present modes, gradient mode and autocast; pass them to `guarded`."""
    modes = [torch._C._get_function_stack_at(i) for i in range(_depth())]
    below = [torch._C._get_dispatch_stack_at(i) for i in range(_dispatch_depth())]
    casts = [torch.is_autocast_enabled(device) for device in _CASTING]
    # Tracing uses dispatch modes with a key. torch stores those elsewhere, so they are not touched.
    plain = all(getattr(mode, "_mode_key", None) is None for mode in below)
    return chain(
        zip(iter(_dispatch_depth, 0), starmap(_dispatch_pop, repeat((None,))), strict=False) if plain else (),
        map(_dispatch_push, below) if plain else (),
        zip(iter(_depth, 0), starmap(_pop, repeat(())), strict=False),
        # set while no mode is active: a mode may intercept these calls in Python
        map(torch._C._set_grad_enabled, (torch.is_grad_enabled(),)),
        map(torch.set_autocast_enabled, _CASTING, casts),
        map(push, modes),
    )


def guarded(enter: Iterable[object], action: Callable[[], Result], leave: Iterable[object]) -> Result:
    """Run ``action`` between two iterators of C code. ``leave`` always runs, and no signal interrupts either."""
    try:
        try:
            deque(enter, maxlen=0)
            return action()
        except BaseException as error:
            abandon(error)  # before `leave`, which undoes what these generators restore
            raise
    finally:
        deque(leave, maxlen=0)


def within(modes: Sequence[TorchFunctionMode], action: Callable[[], Result]) -> Result:
    """Run ``action`` inside modes, the last one innermost."""
    return guarded(map(push, modes), action, found())


def uncollected(action: Callable[[], Result]) -> Result:
    """Run ``action`` with Python's garbage collector switched off.

    For passes under a dispatch mode: objects left by an interrupted call may call torch when they are freed, and then a
    view under construction would fail.
    """
    return guarded(starmap(gc.disable, [()]), action, starmap(gc.enable, [()] if gc.isenabled() else []))


def as_written() -> AbstractContextManager[Any]:
    """Run compiled modules without compilation inside: compiled code cannot be observed."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes a second
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def as_found(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a public function: torch's states are restored afterwards, also after an interrupt.

    After an interrupt, torch's own context managers may fail when they end, because their state is already restored.
    The caller gets the KeyboardInterrupt, not that failure.
    """

    @wraps(function)
    def bounded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return guarded((), lambda: function(*args, **kwargs), found())
        except RuntimeError as error:
            if any(isinstance(one, KeyboardInterrupt) for one in _causes(error)):
                raise KeyboardInterrupt from error
            raise

    return bounded


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes and its contexts, recursively."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo.extend(other for other in (one.__context__, one.__cause__) if other is not None)


def abandon(error: BaseException) -> None:
    """Close the generators that an error left half-way. Otherwise they end when its traceback is freed, much later.

    These are context managers that were interrupted while they began or ended, and generators that a comprehension
    of this package was iterating over.
    """
    generators = list[Any]()
    for one in _causes(error):
        trace = one.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            if frame.f_code in _MANAGERS:
                generators.append(getattr(frame.f_locals.get("self"), "gen", None))
            elif frame.f_code.co_filename.startswith(_OURS):
                generators.append(frame.f_locals.get(".0"))
    for generator in reversed(generators):  # innermost first
        if isinstance(generator, GeneratorType) and generator.gi_frame is not None and not generator.gi_running:
            with suppress(Exception):  # a failure here must not hide the first error
                generator.close()
