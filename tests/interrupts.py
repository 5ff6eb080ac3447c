"""Ctrl-C at any moment, and what has to be as it was before."""

from __future__ import annotations

import gc
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

Action = Callable[[], object]

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def surroundings() -> dict[str, Any]:
    """The states of torch that code in this thread runs in."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "functions": [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())],
        "operations": torch._C._len_torch_dispatch_stack(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "saving": hooks,
        "random": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
    }


def inside(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a computation might change."""
    return {
        "held": [(name, id(x)) for name, x in (*model.named_parameters(), *model.named_buffers())],
        "values": [x.tolist() for x in (*model.parameters(), *model.buffers())],
        "training": [m.training for m in model.modules()],
        "hooks": [len(getattr(m, kind)) for m in model.modules() for kind in (*_HOOKS, *_PRE_HOOKS)],
    }


def moments(action: Action, *files: str, called_from: str = "") -> list[int]:
    """The moments of an action at which Python handles signals, in some files of Python code or in all."""
    return _run(action, None, files, called_from)[0]


def interrupted_at(action: Action, moment: int) -> KeyboardInterrupt | None:
    """Ctrl-C at one of them: what comes out, if anything does."""
    return _run(action, moment)[1]


def _run(
    action: Action, moment: int | None, files: Sequence[str] = (), called_from: str = ""
) -> tuple[list[int], KeyboardInterrupt | None]:
    passed, found = 0, list[int]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passed
        if event in ("call", "c_return"):  # Python looks for signals where a function begins, and where one of C ends
            passed += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            if (not files or frame.f_code.co_filename.endswith(tuple(files))) and caller.endswith(called_from):
                found.append(passed)
            if passed == moment:
                raise KeyboardInterrupt

    came_out = None
    sys.setprofile(count)
    try:
        action()
    except KeyboardInterrupt as error:
        came_out = error
    finally:
        sys.setprofile(None)
    return found, came_out


def interrupted_within(action: Action, seconds: float, generator: random.Random) -> bool:
    """Ctrl-C by the clock, at a random moment of the time given; whether it came before the end."""
    fired, running = False, True

    def interrupt(*_: Any) -> None:
        nonlocal fired
        if running:
            fired = True
            raise KeyboardInterrupt

    with _without_test_tools():
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, seconds))
            action()
            running = False
        except KeyboardInterrupt:
            running = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return fired


@contextmanager
def _without_test_tools() -> Iterator[None]:
    """Set aside what pytest and hypothesis run in the middle of other code, and what a user's process does not have.

    These are Python code that an interrupt may hit: callbacks of the garbage collector, and pytest's hook for errors
    that cannot be raised, which then fails the test.
    """
    callbacks, hook = list(gc.callbacks), sys.unraisablehook
    gc.callbacks.clear()
    sys.unraisablehook = sys.__unraisablehook__
    try:
        yield
    finally:
        sys.unraisablehook = hook
        gc.callbacks.extend(callbacks)
