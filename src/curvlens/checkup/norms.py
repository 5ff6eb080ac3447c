"""Norms whose input varies less than ε: such a norm multiplies by 1/√ε, independent of the data."""

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
"""The warning comes if at least this share of the rows lies below ε. Rows of padding and of zeros do not count."""


def check_norms(patient: Patient) -> Iterator[Finding]:
    """Check that the input of each norm varies by more than its ε. If not, lower ``norm.eps``."""
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
            f"The variance at the input of {listing(small)} is below the eps of the norm.",
            "The curvature there depends on eps more than on the data. The number is the median variance in units of "
            "eps.",
            "norm.eps = 1e-12  # or use larger embeddings and weights before the norm",
            min(ratios[name] for name in small),
            "eps",
        )


def _without_padding(x: Tensor, mask: Any) -> Tensor:
    """The rows of real tokens. Rows of padding may be small without harm."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and x.ndim > 2 and x.shape[:2] == mask.shape
    return x[mask != 0] if fits else x


def spread(module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, float] | None:
    """The variance (mean square for RMSNorm) of each nonzero row, and ε. None if the module is not a norm."""
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
