"""NaN and infinity, and where they first appear."""

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
    """Check parameters, buffers and inputs for NaN and infinity. Find their source, then replace them.

    Infinity is allowed in buffers and masks, which may hold −inf on purpose.
    """
    model = patient.model
    bad = [f"parameter {name}" for name, p in model.named_parameters() if _bad(p)]
    bad += [f"buffer {name}" for name, b in model.named_buffers() if _bad(b, infinity=False)]
    bad += [f"input {name}" for name, x in _inputs(patient.batch) if _bad(x, infinity="mask" not in name)]
    if bad:
        yield Finding(
            "not-finite-values",
            "error",
            f"NaN or infinite numbers in {listing(bad)}.".replace("'", ""),
            "They make the loss and every entry of a product NaN.",
            "torch.nan_to_num_(p.data)  # first find out where they come from, such as a training run that diverged",
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
    """Find the first module with NaN in its output (or infinity, if the loss is not finite). Look at that module."""
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
        f"The first module with an output that is not finite is {places[0]}."
        if places
        else f"The loss is {total}, but all modules return finite numbers.",
        "The loss or its derivatives are NaN.",
        "torch.autograd.set_detect_anomaly(True)  # shows the operation; if float16 overflows, call model.float()",
    )
