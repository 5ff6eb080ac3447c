"""The gradient noise scale for a document: a number only where the gradient can be told from its noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from curvlens.analysis.estimates import estimate, shown
from curvlens.results import Estimate

NO_SIGNAL = "the 95 % interval of ‖g‖² is not all above 0: the gradient of so few samples cannot be told from its noise"
TOO_COARSE = "its error is larger than the number itself"


def noise_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """tr Σ, ‖g‖² and their ratio, of the whole and of each block. A scale that is not known has a ``why``.

    The estimate of ‖g‖² may be negative: its interval is on both sides of it, not on the logarithm, which never
    reaches 0.
    """
    gradient = shown(replace(estimate(result["gradient"]), positive=False))
    scale = _scale(estimate(result["scale"]))
    if gradient["value"] is None or gradient["low"] is None or gradient["low"] <= 0:
        scale = _unknown(scale, NO_SIGNAL)
    scales = {name: _scale(estimate(each)) for name, each in result["scales"].items()}
    return {
        **dict(result),
        "trace": shown(estimate(result["trace"])),
        "gradient": gradient,
        "scale": scale,
        "scales": scales,
    }


def _scale(found: Estimate) -> dict[str, Any]:
    plain = shown(found)
    if plain["value"] is None:
        return _unknown(plain, NO_SIGNAL)
    if plain["stderr"] is None or plain["stderr"] > abs(plain["value"]):
        return _unknown(plain, TOO_COARSE)
    return plain


def _unknown(plain: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {**plain, "value": None, "stderr": None, "low": None, "high": None, "why": why}
