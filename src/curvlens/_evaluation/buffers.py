"""Buffers that a forward pass writes into: a counter, running statistics, the vectors of a power iteration.

If the loss depends on what earlier passes wrote, every pass computes a different function: there is no curvature.
Otherwise passes write into copies, and the model's own buffers do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlens.checksum import same_bits

Pass = Callable[[Mapping[str, Tensor]], tuple[float, Mapping[str, Tensor]]]
"""Maps the buffers to use to (the loss of a pass, the buffers that the model holds after it)."""

_ROUNDING = 8
"""Two losses are equal up to this many units of rounding: a GPU does not add in the same order twice."""


@dataclass(frozen=True)
class Writes:
    """The buffers that a forward pass writes."""

    names: tuple[str, ...] = ()
    matters: bool = False
    """Whether the loss depends on the values of these buffers before the pass."""
    drift: float = 0.0
    """The difference between a second pass and the first, relative to the loss."""


def copies(model: nn.Module, names: Mapping[str, object] | tuple[str, ...]) -> dict[str, Tensor]:
    """Copies of the named buffers."""
    return {name: x.detach().clone() for name, x in model.named_buffers() if name in names}


def writes(model: nn.Module, passed: Pass, dtype: torch.dtype) -> Writes:
    """Run passes and find which buffers they write, and whether the loss depends on them."""
    held = {name: x for name, x in model.named_buffers() if x.device.type != "meta"}
    given = copies(model, held)
    versions = {name: x._version for name, x in given.items()}
    first, left = _run(passed, given) if held else (0.0, {})
    names = tuple(
        name
        for name, x in given.items()
        if left.get(name) is not x or x._version != versions[name] or not same_bits(x, held[name])
    )
    if not names:
        return Writes()
    second = {name: left.get(name, x).detach() for name, x in given.items()}
    trials = [copies(model, held), second, {name: _scrambled(x) if name in names else x for name, x in second.items()}]
    changes = [_change(passed, {name: x.clone() for name, x in trial.items()}, first) for trial in trials]
    return Writes(names, max(changes) > _ROUNDING * torch.finfo(dtype).eps, changes[1])


def _run(passed: Pass, buffers: Mapping[str, Tensor]) -> tuple[float, Mapping[str, Tensor]]:
    torch.manual_seed(0)  # dropout has a check of its own
    return passed(buffers)


def _change(passed: Pass, buffers: Mapping[str, Tensor], reference: float) -> float:
    """The relative difference between the loss with ``buffers`` and ``reference``; infinite if the pass fails."""
    try:
        value, _ = _run(passed, buffers)
    except Exception:
        return math.inf
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    change = abs(value - reference) / max(abs(reference), 1e-300)
    return math.inf if math.isnan(change) else change


def _scrambled(x: Tensor) -> Tensor:
    """Random values of the same dtype and size. A converged power iteration would not change its buffer otherwise."""
    if x.dtype == torch.bool:
        return ~x
    if not (x.is_floating_point() or x.is_complex()):
        return x + 1
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = float(x.abs().double().square().mean().sqrt()) if x.numel() else 0.0
    return x + (noise * (size if math.isfinite(size) and size else 1.0)).to(x)


class Watch:
    """Copies of the buffers that the first pass did not write. Later writes are detected and undone."""

    def __init__(self, model: nn.Module, known: tuple[str, ...]) -> None:
        self._held = [
            (name, x, x.detach().clone())
            for name, x in model.named_buffers()
            if name not in known and x.device.type != "meta"
        ]

    def put_back(self) -> list[str]:
        """Restore the buffers that were written, and return their names."""
        found = [(name, x, before) for name, x, before in self._held if not same_bits(x, before)]
        for _, x, before in found:
            x.data.copy_(before)
        return [name for name, *_ in found]
