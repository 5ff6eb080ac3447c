"""Embeddings whose gradient is not that of the loss, because torch was asked to change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient, change
from curvlens.errors import listing


def check_embeddings(patient: Patient) -> Iterator[Finding]:
    """A padding row that tokens which count depend on, and gradients divided by how often a token occurs."""
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
            "torch leaves this row out of the backward pass: its derivatives are missing, and if the table is tied to "
            "the unembedding H is not even symmetric. The size is the relative change of the loss when the row moves "
            "by its own length.",
            f"model.get_submodule({next(iter(used))!r}).padding_idx = None",
            max(used.values()),
        )
    scaled = [name for name, table in tables.items() if table.scale_grad_by_freq]
    if scaled:
        yield Finding(
            "scaled-gradient",
            "error",
            f"scale_grad_by_freq is set in {listing(scaled)}.",
            "What autograd calls a gradient is divided by how often a token occurs: neither it nor a product with H is "
            "that of the loss.",
            f"model.get_submodule({scaled[0]!r}).scale_grad_by_freq = False",
        )


def _use_of_padding_row(patient: Patient, table: nn.Embedding) -> float:
    """How much the loss changes when the padding row is another one where it is looked up; 0 if it is not used."""
    if table.padding_idx is None:
        return 0.0
    row = table.padding_idx
    seen: list[bool] = []

    def move(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        tokens = args[0] if args else kwargs["input"]
        here = (tokens == row).unsqueeze(-1)
        seen.append(bool(here.any()))
        step = result.detach().square().mean().sqrt().clamp_min(1e-3)
        # Not the same in all directions: a norm would take that out.
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
