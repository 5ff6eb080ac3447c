"""The module that a forward pass is currently in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from curvlens import batches

Seen = Callable[[str, nn.Module, list[Tensor]], None]
"""(name of the module, the module, its tensors)."""


@contextmanager
def hooked(model: nn.Module, *, inputs: Seen | None = None, outputs: Seen | None = None) -> Iterator[None]:
    """Inside the block, call ``inputs`` and ``outputs`` with the tensors that enter and leave each module."""
    handles: list[Any] = []
    try:
        for name, module in model.named_modules():

            def before(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if inputs is not None:
                    inputs(name, m, batches.tensors([list(args), dict(kwargs)]))

            def after(m: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                if outputs is not None:
                    outputs(name, m, batches.tensors(result))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Location:
    """The module a pass is in: the innermost one that was entered and not yet left."""

    def __init__(self) -> None:
        self._path: list[str] = []

    def enter(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        """For ``hooked(inputs=)``."""
        self._path.append(name)

    def leave(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        """For ``hooked(outputs=)``."""
        self._path.pop()

    @property
    def name(self) -> str:
        """The name of the module; "the model itself" for the root, "the loss" outside of the model."""
        return (self._path[-1] or "the model itself") if self._path else "the loss"
