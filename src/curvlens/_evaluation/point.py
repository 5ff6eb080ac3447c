"""The state of a model: a copy of everything in it that can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.checksum import same_bits


class Point:
    """A copy to compare with later. It detects every change, also through ``.data``, and writes that change no bit."""

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._signature = self._sign(model, tensors, device)
        self._copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]

    @staticmethod
    def _sign(model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> tuple[Any, ...]:
        casts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        modules = tuple((id(m), m.training) for m in model.modules())
        return (casts, modules, tuple(map(_place, tensors)))

    def holds(self, model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> bool:
        """Whether nothing has changed: autocast, modules, modes, and every bit of the tensors."""
        same = self._signature == self._sign(model, tensors, device)
        return same and all(map(same_bits, tensors, self._copies))

    @property
    def bytes(self) -> int:
        """The size of the copies in bytes."""
        return sum(x.nbytes for x in self._copies)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Identity and version of a tensor: a write invalidates graphs that saved it, even if no bit changed."""
    return id(x), x.data_ptr(), x.shape, x.dtype, None if x.is_inference() else x._version
