"""Norms at which ε decides: below it a norm multiplies by 1/√ε, whatever the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.checkup.finding import Finding
from curvlens.checkup.location import hooked
from curvlens.checkup.patient import Patient
from curvlens.errors import listing

SHARE = 0.25
"""Said when so many of the rows at a norm lie below its ε. Rows of padding, and of zeros, are left out."""


def check_norms(patient: Patient) -> Iterator[Finding]:
    """The variance, or the mean square, at the input of every norm, in one pass."""
    mask = patient.few.get("attention_mask") if isinstance(patient.few, Mapping) else None
    shares: dict[str, float] = {}
    ratios: dict[str, float] = {}

    def look(name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        found = spread(module, [_without_padding(x, mask) for x in tensors])
        if found is None:
            return
        values, eps = found
        if values.numel() and eps > 0:
            shares[name] = max(float((values < eps).double().mean()), shares.get(name, 0.0))
            ratios[name] = min(float(values.median() / eps), ratios.get(name, float("inf")))

    with torch.no_grad(), hooked(patient.model, inputs=look):
        patient.loss_of(patient.few)
    small = [name for name, share in shares.items() if share >= SHARE]
    if small:
        yield Finding(
            "tiny-variance",
            "warning",
            f"The input of {listing(small)} varies less than the norm's eps allows for.",
            "eps and not the data decides the curvature there: another eps, another result. The number is the "
            "median variance.",
            "norm.eps = 1e-12  # or larger embeddings and weights in front of the norm",
            min(ratios[name] for name in small),
            "eps",
        )


def _without_padding(x: Tensor, mask: Any) -> Tensor:
    """The rows of tokens that are there: those of padding may be as small as they like."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and x.ndim > 2 and x.shape[:2] == mask.shape
    return x[mask != 0] if fits else x


def spread(module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, float] | None:
    """What a norm divides by, squared and row by row, without rows of zeros, and its ε; None for other modules."""
    x = next((x for x in tensors if x.is_floating_point()), None)
    if x is None:
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        rows = x.detach().flatten(x.ndim - len(module.normalized_shape)).double()
        eps = torch.finfo(x.dtype).eps if module.eps is None else float(module.eps)
        centred = isinstance(module, nn.LayerNorm)
    else:
        name, found = type(module).__name__, getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not name.endswith(("RMSNorm", "LayerNorm")) or not isinstance(found, float):
            return None
        rows, eps = x.detach().double(), found
        centred = not (name.endswith("RMSNorm") or hasattr(module, "variance_epsilon"))
    rows = rows[rows.any(-1)]
    return (rows.var(-1, unbiased=False) if centred else rows.square().mean(-1)), eps
