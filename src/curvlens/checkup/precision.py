"""Digits lost on the way: half precision, and float32 inside of float64."""

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
"""What a number loses in float32, at most, relative to itself."""
_EXACT = 1e-12
"""A cast that changes less than that loses nothing: masks, counts, powers of two."""


def check_half(patient: Patient) -> Iterator[Finding]:
    """Parameters in half precision."""
    half = [name for name, p in patient.model.named_parameters() if p.dtype in HALF]
    if half:
        dtype = str(dict(patient.model.named_parameters())[half[0]].dtype).removeprefix("torch.")
        yield Finding(
            "half-precision",
            "warning",
            f"{len(half)} parameters are in {dtype}: {listing(half)}.",
            "Second derivatives carry two or three digits at best. The size is the relative change of the loss against "
            "float32 at the same weights; that of the curvature is larger.",
            "model.float()  # model.double() for exact work",
            _against_float32(patient),
        )


def _against_float32(patient: Patient) -> float | None:
    """How far the loss is from that of a float32 copy of the model."""
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
    """Autocast, which rounds matrix products whatever the parameters are."""
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
        "Second derivatives carry two or three digits at best. The size is the relative change of the loss.",
        "with torch.autocast(device, enabled=False): ...",
        size,
    )


def check_inside(patient: Patient) -> Iterator[Finding]:
    """Half precision inside of the forward pass of a model whose parameters have more: its own autocast, its casts."""
    device = next((p.device.type for p in patient.model.parameters()), "cpu")
    wide = all(p.dtype not in HALF for p in patient.model.parameters())
    if torch.is_autocast_enabled(device) or not wide:
        return  # found already
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
        "Second derivatives carry two or three digits at best, too few to compare them with differences. The size is "
        "the relative rounding.",
        "model.double()  # autocast leaves float64 alone; or take autocast out of the forward pass",
        seen.lost,
    )


class _Places(HalfInside):  # type: ignore[no-untyped-call]
    """Remembers the modules too."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self._location = location
        self.places: dict[str, None] = {}

    def rounded(self) -> None:
        self.places[self._location.name] = None


def check_islands(patient: Patient) -> Iterator[Finding]:
    """Numbers that pass through float32 in a float64 model, in spite of `KeepFloat64`."""
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
        "Eight digits of sixteen are left, in the loss and in all derivatives. The size is the relative rounding.",
        "model.double()  # and new tensors as x.new_zeros(...) or dtype=x.dtype, no numpy in float32",
        max(islands.found.values(), default=_ROUNDING),
    )


_INTEGERS = {
    getattr(torch.ops.aten, name).default for name in ("floor", "ceil", "round", "trunc", "floor_divide", "sign")
}
"""Operations whose results are whole numbers: what was lost before them is gone (LongT5 numbers its blocks so)."""


class Islands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and remembers in which module float64 became float32 or met it.

    What was lost is followed to the number that comes out: masks and the numbers of positions, computed in float32 and
    made integers, lose nothing of it.
    """

    def __init__(self, location: Location, batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._location = location
        self._given = {x.data_ptr() for x in batches.tensors(batch)}
        self._sizes: dict[str, float] = {}
        self._lost_in: dict[int, frozenset[str]] = {}
        """By storage, the modules in which something of its numbers was lost."""
        self._held: list[Tensor] = []
        """Freed storage would be used again under the same address."""
        self._reached: frozenset[str] = frozenset()

    @property
    def found(self) -> dict[str, float]:
        """The modules in which something was lost that the loss depends on, and how much."""
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
    """What of a float64 input is lost in a float32 result, relative to its largest entry."""
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
"""What is below is the −∞ of a mask: behind a softmax it is 0, however it was rounded (LongT5 adds −1e10)."""


def _rounded(x: Tensor) -> bool:
    """Whether a float32 tensor holds more than small integers, masks and powers of two, which are exact."""
    coarse = x.detach().bfloat16().float()
    return bool((x.isfinite() & (x > _MASKED) & (coarse != x)).any())
