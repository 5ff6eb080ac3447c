"""Whether Ctrl-C may end a computation with what it has so far.

A user who interrupts an estimate gets the samples that were done. A unit of long work must be whole: it is stored under
a name that says how many samples it has, and nothing would ever complete it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")
_whole: ContextVar[bool] = ContextVar("whole", default=False)


def all_or_nothing(action: Callable[[], Result]) -> Result:
    """Run ``action`` so that an interrupt ends it, without a partial result."""
    token = _whole.set(True)
    try:
        return action()
    finally:
        _whole.reset(token)


def must_be_whole() -> bool:
    """Whether partial results are of no use here: raise the interrupt again."""
    return _whole.get()
