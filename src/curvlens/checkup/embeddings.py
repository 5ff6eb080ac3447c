"""Embeddings with an option that makes torch return something other than the gradient of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient, change
from curvlens.errors import listing


def check_embeddings(patient: Patient) -> Iterator[Finding]:
    """Check ``padding_idx`` (if the loss depends on that row, set it to None) and ``scale_grad_by_freq`` (unset it)."""
    tables = {
        name: m for name, m in patient.model.named_modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad
    }
    used = {name: size for name, table in tables.items() if (size := _use_of_padding_row(patient, table))}
    if used:
        rows = [f"row {tables[name].padding_idx} of {name}.weight" for name in used]
        yield Finding(
            "padding-row-used",
            "error",
            f"The loss depends on {listing(rows)}, which is the padding_idx of its embedding.".replace("'", ""),
            "torch computes no gradient for this row, so its derivatives are missing. If the table is tied to the "
            "unembedding, H is not symmetric. The size is the relative change of the loss when the row moves by its "
            "own length.",
            f"model.get_submodule({next(iter(used))!r}).padding_idx = None",
            max(used.values()),
        )
    scaled = [name for name, table in tables.items() if table.scale_grad_by_freq]
    if scaled:
        yield Finding(
            "scaled-gradient",
            "error",
            f"scale_grad_by_freq is set in {listing(scaled)}.",
            "torch divides the gradient of a row by the number of times its token occurs. Gradients and products with "
            "H are not those of the loss.",
            f"model.get_submodule({scaled[0]!r}).scale_grad_by_freq = False",
        )


def _use_of_padding_row(patient: Patient, table: nn.Embedding) -> float:
    """The relative change of the loss when the looked-up padding row moves; 0 if the row is not used."""
    if table.padding_idx is None:
        return 0.0
    row = table.padding_idx
    seen: list[bool] = []

    def move(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        tokens = args[0] if args else kwargs["input"]
        here = (tokens == row).unsqueeze(-1)
        seen.append(bool(here.any()))
        step = result.detach().square().mean().sqrt().clamp_min(1e-3)
        # Different in each direction: a LayerNorm removes a constant shift.
        along = torch.linspace(-1, 1, result.shape[-1], dtype=torch.float64, device=result.device).to(result)
        moved: Tensor = result + here * step * along
        return moved

    before = patient.loss_of(patient.batch)
    handle = table.register_forward_hook(move, with_kwargs=True)
    try:
        after = patient.loss_of(patient.batch)
    finally:
        handle.remove()
    size = change(after, before)
    exact = {torch.float64: 1e-10, torch.float32: 1e-6}.get(table.weight.dtype, 1e-2)
    return size if any(seen) and size > exact else 0.0
