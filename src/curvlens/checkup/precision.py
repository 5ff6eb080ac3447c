"""Lost digits: half precision, and float32 steps in a float64 model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvlens import batches
from curvlens.batches import Batch
from curvlens.checkup.finding import Finding
from curvlens.checkup.location import Location, hooked
from curvlens.checkup.patient import Patient, change
from curvlens.errors import listing
from curvlens.precision import HALF, HalfInside, is_float64

_ROUNDING = 2.0**-24
"""The largest relative rounding error of a number in float32."""
_EXACT = 1e-12
"""A cast that changes less than this is exact: masks, counts, powers of two."""


def check_half(patient: Patient) -> Iterator[Finding]:
    """Check for parameters in half precision. Call ``model.float()`` or ``model.double()``."""
    half = [name for name, p in patient.model.named_parameters() if p.dtype in HALF]
    if half:
        dtype = str(dict(patient.model.named_parameters())[half[0]].dtype).removeprefix("torch.")
        yield Finding(
            "half-precision",
            "warning",
            f"{len(half)} parameters are in {dtype}: {listing(half)}.",
            "Second derivatives have two or three digits at best. The size is the relative difference of the loss from "
            "float32 at the same weights. The error of the curvature is larger.",
            "model.float()  # model.double() for exact work",
            _against_float32(patient),
        )


def _against_float32(patient: Patient) -> float | None:
    """The relative difference of the loss from that of a float32 copy of the model."""
    if not patient.runs:
        return None
    loss = patient.loss
    assert loss is not None
    values = []
    for model, batch in (
        (patient.model, patient.few),
        (copy.deepcopy(patient.model).float(), batches.map_tensors(_wide, patient.few)),
    ):
        with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
            total, count = loss.sum_and_count(loss.outputs(model, batch), batch)
        values.append(float(total) / float(count) if float(count) else float("nan"))
    return change(values[0], values[1])


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def check_autocast(patient: Patient) -> Iterator[Finding]:
    """Check for autocast, which rounds matrix products to half precision. Disable it."""
    device = next((p.device.type for p in patient.model.parameters()), "cpu")
    if not torch.is_autocast_enabled(device):
        return
    size = None
    if patient.runs:
        inside = patient.loss_of(patient.few)
        with torch.autocast(device, enabled=False):
            size = change(inside, patient.loss_of(patient.few))
    if size == 0.0 and is_float64(patient.model):
        return  # autocast leaves float64 alone
    patient.coarse = True
    yield Finding(
        "autocast-active",
        "warning",
        f"torch.autocast is on for {device}, in {torch.get_autocast_dtype(device)}.",
        "Second derivatives have two or three digits at best. The size is the relative change of the loss.",
        "with torch.autocast(device, enabled=False): ...",
        size,
    )


def check_inside(patient: Patient) -> Iterator[Finding]:
    """Check for casts to half precision inside the forward pass. Call ``model.double()`` or remove the casts."""
    device = next((p.device.type for p in patient.model.parameters()), "cpu")
    wide = all(p.dtype not in HALF for p in patient.model.parameters())
    if torch.is_autocast_enabled(device) or not wide:
        return  # `check_half` or `check_autocast` reports it
    location = Location()
    seen = _Places(location)
    with seen, hooked(patient.model, inputs=location.enter, outputs=location.leave):
        patient.loss_of(patient.few)
    if seen.dtype is None:
        return
    patient.coarse = patient.half = True
    yield Finding(
        "half-precision-inside",
        "warning",
        f"The forward pass rounds to {str(seen.dtype).removeprefix('torch.')} in {listing(seen.places)}: it uses "
        "torch.autocast, or casts of its own.",
        "Second derivatives have two or three digits at best, too few to check them by finite differences. The size is "
        "the relative rounding error.",
        "model.double()  # autocast does not change float64; or remove autocast from the forward pass",
        seen.lost,
    )


class _Places(HalfInside):  # type: ignore[no-untyped-call]
    """Also records the modules in which a pass rounds."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self._location = location
        self.places: dict[str, None] = {}

    def rounded(self) -> None:
        self.places[self._location.name] = None


def check_islands(patient: Patient) -> Iterator[Finding]:
    """Check for float32 steps in a float64 model that `KeepFloat64` does not prevent. Keep the dtype in the model."""
    dtypes = {name: p.dtype for name, p in patient.model.named_parameters() if p.is_floating_point()}
    if torch.float64 not in dtypes.values():
        return
    location = Location()
    islands = Islands(location, patient.few)
    with islands, hooked(patient.model, inputs=location.enter, outputs=location.leave):
        patient.loss_of(patient.few)
    narrow = [name for name, dtype in dtypes.items() if dtype is torch.float32]
    if not islands.found and not narrow:
        return
    patient.coarse = True
    places = listing(islands.found)
    parameters = f" Parameters in float32: {listing(narrow)}." if narrow else ""
    yield Finding(
        "float32-island",
        "warning",
        f"The model is in float64, but numbers pass through float32 in {places or 'its parameters'}.{parameters}",
        "Loss and derivatives have eight digits instead of sixteen. The size is the relative rounding error.",
        "model.double()  # and create tensors with x.new_zeros(...) or dtype=x.dtype, without numpy in float32",
        max(islands.found.values(), default=_ROUNDING),
    )


_INTEGERS = {
    getattr(torch.ops.aten, name).default for name in ("floor", "ceil", "round", "trunc", "floor_divide", "sign")
}
"""Operations with whole numbers as results: earlier rounding has no effect (LongT5 computes block numbers this way)."""


class Islands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches all operations and records the modules in which float64 becomes float32 or is combined with it.

    A lost digit is followed to the loss. Masks and position numbers that are computed in float32 and become integers
    cost no digits.
    """

    def __init__(self, location: Location, batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._location = location
        self._given = {x.data_ptr() for x in batches.tensors(batch)}
        self._sizes: dict[str, float] = {}
        self._lost_in: dict[int, frozenset[str]] = {}
        """By address of a storage, the modules in which its numbers lost digits."""
        self._held: list[Tensor] = []
        """Keeps tensors alive: a freed storage could be reused at the same address."""
        self._reached: frozenset[str] = frozenset()

    @property
    def found(self) -> dict[str, float]:
        """The modules in which the loss loses digits, and the relative rounding error in each."""
        return {name: size for name, size in self._sizes.items() if name in self._reached}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = batches.tensors([list(args), kwargs or {}])
        result = func(*args, **(kwargs or {}))
        wide = [x for x in inputs if x.dtype is torch.float64]
        if wide:
            outputs = [x for x in batches.tensors(result) if x.dtype is torch.float32]
            lost = max((_lost(wide, x) for x in outputs), default=0.0)
            if not outputs:
                met = any(x.dtype is torch.float32 and x.data_ptr() not in self._given and _rounded(x) for x in inputs)
                lost = _ROUNDING if met else 0.0
            if lost > _EXACT:
                name = self._location.name
                self._sizes[name] = max(lost, self._sizes.get(name, 0.0))
                self._follow(batches.tensors(result), frozenset([name]))
        before = [self._lost_in.get(x.untyped_storage().data_ptr(), frozenset[str]()) for x in inputs]
        where = frozenset[str]().union(*before)
        if where and func is torch.ops.aten._local_scalar_dense.default:
            self._reached |= where
        elif where and func not in _INTEGERS:
            self._follow(batches.tensors(result), where)
        return result

    def _follow(self, results: list[Tensor], where: frozenset[str]) -> None:
        for x in results:
            if x.is_floating_point():
                place = x.untyped_storage().data_ptr()
                self._lost_in[place] = self._lost_in.get(place, frozenset()) | where
                self._held.append(x)


def _lost(wide: list[Tensor], narrow: Tensor) -> float:
    """The rounding error of a float32 result of a float64 input, relative to the largest entry."""
    source = wide[-1]  # the source of a copy comes last
    try:
        source = source.expand_as(narrow)
    except RuntimeError:
        return _ROUNDING
    finite = source.isfinite() & narrow.isfinite()
    if not bool(finite.any()):
        return 0.0
    error = (source - narrow.double())[finite].abs().max()
    return min(float(error / source[finite].abs().max().clamp_min(1e-300)), 1.0)


_MASKED = -1e8
"""A number below this is the −∞ of a mask. Its softmax is 0 with any rounding (LongT5 adds −1e10)."""


def _rounded(x: Tensor) -> bool:
    """Whether a float32 tensor may be rounded: it holds more than small integers, masks and powers of two."""
    coarse = x.detach().bfloat16().float()
    return bool((x.isfinite() & (x > _MASKED) & (coarse != x)).any())
