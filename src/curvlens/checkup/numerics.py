"""Numbers that are none: NaN and infinity, and where they first appear."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.checkup.finding import Finding
from curvlens.checkup.location import hooked
from curvlens.checkup.patient import Patient
from curvlens.errors import listing


def check_values(patient: Patient) -> Iterator[Finding]:
    """NaN or infinity in parameters and inputs, NaN in buffers; a buffer, or a mask, may hold −inf with good reason."""
    model = patient.model
    bad = [f"parameter {name}" for name, p in model.named_parameters() if _bad(p)]
    bad += [f"buffer {name}" for name, b in model.named_buffers() if _bad(b, infinity=False)]
    bad += [f"input {name}" for name, x in _inputs(patient.batch) if _bad(x, infinity="mask" not in name)]
    if bad:
        yield Finding(
            "not-finite-values",
            "error",
            f"NaN or infinite numbers in {listing(bad)}.".replace("'", ""),
            "They spread to the loss and to every entry of a product.",
            "torch.nan_to_num_(p.data)  # after finding out where they come from; a training run that diverged?",
        )


def _bad(x: Tensor, *, infinity: bool = True) -> bool:
    if x.device.type == "meta" or not (x.is_floating_point() or x.is_complex()) or x.layout != torch.strided:
        return False
    return not bool(x.isfinite().all()) if infinity else bool(x.isnan().any())


def _inputs(batch: Batch | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch by key or position."""
    if isinstance(batch, Mapping):
        parts = [(str(key), value) for key, value in batch.items()]
    else:
        parts = [(str(i), value) for i, value in enumerate(batch if isinstance(batch, (list, tuple)) else [batch])]
    for name, value in parts:
        for x in batches.tensors(value):
            yield name, x


def check_outputs(patient: Patient) -> Iterator[Finding]:
    """The first module whose output is not a number, or infinite on the way to a loss that is not finite."""
    nan: list[str] = []
    infinite: list[str] = []

    def look(name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        known = f"{name or 'the model itself'} ({type(module).__name__})"
        if any(_bad(x, infinity=False) for x in tensors):
            nan.append(known)
        elif any(_bad(x) for x in tensors):
            infinite.append(known)

    with hooked(patient.model, outputs=look):
        total, _ = patient.sum_and_count(patient.few)
    if math.isfinite(total) and not nan:
        return
    places = infinite[:1] or nan[:1]
    yield Finding(
        "not-finite-output",
        "error",
        f"The output of {places[0]} is the first that is not finite."
        if places
        else f"The loss is {total}, though all modules return finite numbers.",
        "The loss or its derivatives are NaN.",
        "torch.autograd.set_detect_anomaly(True)  # to see the operation; model.float() if it overflows in float16",
    )
