"""Torch's global states (modes, gradients, autocast), restored after every call, even after Ctrl-C.

Python handles a signal where a function begins and where one of C ends. So a ``with`` whose manager is written in
Python can be left between the change it makes and the block that undoes it: ``torch.no_grad`` stays on, a mode is lost
while torch has it off its stack, and a generator that was to put it back does so when the traceback is freed, perhaps
long after. Here what was found is noted first and put back by one call of C code, where no signal is handled.
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
    """Steps of C code that put back the modes, gradients and casts of this moment, for `guarded`."""
    modes = [torch._C._get_function_stack_at(i) for i in range(_depth())]
    below = [torch._C._get_dispatch_stack_at(i) for i in range(_dispatch_depth())]
    casts = [torch.is_autocast_enabled(device) for device in _CASTING]
    # Tracing has dispatch modes with a key, which torch keeps elsewhere: those are its own business.
    plain = all(getattr(mode, "_mode_key", None) is None for mode in below)
    return chain(
        zip(iter(_dispatch_depth, 0), starmap(_dispatch_pop, repeat((None,))), strict=False) if plain else (),
        map(_dispatch_push, below) if plain else (),
        zip(iter(_depth, 0), starmap(_pop, repeat(())), strict=False),
        # while no mode is there: they may look at these calls, in Python
        map(torch._C._set_grad_enabled, (torch.is_grad_enabled(),)),
        map(torch.set_autocast_enabled, _CASTING, casts),
        map(push, modes),
    )


def guarded(enter: Iterable[object], action: Callable[[], Result], leave: Iterable[object]) -> Result:
    """Run ``action`` between two iterators of C code: ``leave`` follows whatever happens, and nothing cuts in."""
    try:
        try:
            deque(enter, maxlen=0)
            return action()
        except BaseException as error:
            abandon(error)  # before `leave`, which undoes what these generators put back
            raise
    finally:
        deque(leave, maxlen=0)


def within(modes: Sequence[TorchFunctionMode], action: Callable[[], Result]) -> Result:
    """Run ``action`` inside modes, the last one innermost."""
    return guarded(map(push, modes), action, found())


def uncollected(action: Callable[[], Result]) -> Result:
    """Run ``action`` while Python collects no garbage.

    For passes that are watched in a dispatch mode: what an interrupted call left behind may run torch as it is freed,
    and a view that is being made would fail.
    """
    return guarded(starmap(gc.disable, [()]), action, starmap(gc.enable, [()] if gc.isenabled() else []))


def as_written() -> AbstractContextManager[Any]:
    """Inside, compiled modules run as they are written: they cannot be watched otherwise."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def as_found(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """For a public function: torch's states are afterwards as they were, also if it returns after an interrupt.

    After an interrupt, torch's own context managers may fail as they end, since their state was restored already. The
    caller gets the KeyboardInterrupt, not that failure.
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
    """An error and all that it came from."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo.extend(other for other in (one.__context__, one.__cause__) if other is not None)


def abandon(error: BaseException) -> None:
    """Close the generators that an error left half-way: else they end when its traceback is freed, at any later time.

    These are context managers that were interrupted as they began or ended, and what a comprehension of ours went
    through.
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
    for generator in reversed(generators):  # the innermost first
        if isinstance(generator, GeneratorType) and generator.gi_frame is not None and not generator.gi_running:
            with suppress(Exception):  # a failure here must not hide the first error
                generator.close()
