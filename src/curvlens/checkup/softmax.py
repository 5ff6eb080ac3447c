"""Saturated softmax: almost all weight is on one key, and derivatives lose digits.

Derivatives of a softmax row A are products with A_i (1 − A_i) and A_i A_j. If A_max is near 1, their relative rounding
error is ε/(1 − A_max), where ε is the rounding unit. A product sums over rows, so the digits left are log10 of the
mean of (1 − A_max)/ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlens.checkup.finding import Finding
from curvlens.checkup.location import Location, hooked
from curvlens.checkup.patient import Patient
from curvlens.errors import listing
from curvlens.precision import is_float64

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_MASKED = {torch.float16: -6e4}
"""By dtype: lower scores are masks. The bound is −5e8 in other dtypes."""
LEFT = 1 / 4
"""The warning comes if less than this share of the digits is left: 3.9 in float64, 1.7 in float32.

Measured on small GPTs in float32 (seeds 0–3, the q and k blocks against float64): with 4 digits left, errors are 1e-5;
with 2, 5e-4; with 1, 1e-3; with 0, 1e-2; with −2, 0.1 to 1. Without saturation they are 5e-7.
"""


def check_softmax(patient: Patient) -> Iterator[Finding]:
    """Check in one pass that softmax is not saturated. If it is, use float64 or smaller query and key weights."""
    location = Location()
    watch = Saturation(location)
    with watch, hooked(patient.model, inputs=location.enter, outputs=location.leave):
        patient.loss_of(patient.few, twice=True)
    worst = {name: digits for name, (digits, whole) in watch.digits.items() if digits < LEFT * whole}
    if worst:
        smaller = "smaller query and key weights: use a temperature, or normalise queries and keys"
        yield Finding(
            "saturated-softmax",
            "warning",
            f"Softmax is saturated in {listing(worst)}: nearly all weight is on one key.",
            "1 − max(A) has lost most of its digits, and so has every derivative through attention (the q and k "
            "blocks). The number is the digits that are left.",
            smaller if is_float64(patient.model) else "model.double()  # or use smaller query and key weights",
            min(worst.values()),
            "digits left",
        )


class Saturation(TorchFunctionMode):
    """Watches each softmax of a pass, also inside attention, which runs unfused here."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self._location = location
        self.digits: dict[str, tuple[float, float]] = {}
        """By module: the digits left, and the digits of the dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SOFTMAX and isinstance(result, Tensor):
            scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
            axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            if isinstance(scores, Tensor) and isinstance(axis, int):
                self._look(scores.detach().movedim(axis, -1), result.dtype)
        return result

    def _look(self, scores: Tensor, dtype: torch.dtype) -> None:
        rest = beyond_the_largest(scores)
        if not rest.numel():
            return
        rounding = torch.finfo(dtype).eps
        whole = -math.log10(rounding)
        digits = min(math.log10(max(float(rest.mean()) / rounding, 1.0)), whole)
        name = self._location.name
        self.digits[name] = min((digits, whole), self.digits.get(name, (whole, whole)))


def beyond_the_largest(scores: Tensor) -> Tensor:
    """1 − max(A) of each row with at least two keys that are not masked, computed without cancellation."""
    wide = scores.double()
    allowed = wide > _MASKED.get(scores.dtype, -5e8)
    wide = wide[allowed.sum(-1) > 1]
    attention = wide.masked_fill(wide <= _MASKED.get(scores.dtype, -5e8), -math.inf).softmax(-1)
    return attention.scatter(-1, attention.argmax(-1, keepdim=True), 0.0).sum(-1)
