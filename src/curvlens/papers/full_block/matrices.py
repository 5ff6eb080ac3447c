"""The Hessian of a whole GPT that adds, dense and in closed form, and where its parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens import assembly
from curvlens.data import Addition


def matrices(model: Any, samples: int) -> tuple[Tensor, Tensor, dict[str, slice]]:
    """H and GGN of a GPT that adds, dense and in closed form, and where each parameter is in them."""
    tokens, labels = Addition(digits=2).batch(samples, seed=0)
    found = assembly.read(model).hessian(tokens, labels=labels)
    return found.total.dense(), found.ggn.dense(), dict(found.total.slices)


def rows(places: Mapping[str, slice], prefix: str) -> Tensor:
    """Of the parameters whose names begin so."""
    found = [torch.arange(part.start, part.stop) for name, part in places.items() if name.startswith(prefix)]
    return torch.cat(found)
