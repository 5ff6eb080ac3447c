"""Activation functions with their first two derivatives, accurate for large arguments too, and bounds on these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.errors import CurvlensError

Entries = Float[Tensor, "*shape"]
Function = Callable[[Entries], Entries]


@dataclass(frozen=True)
class Activation:
    """φ, φ' and φ'', and bounds on |φ'| and |φ''|."""

    name: str
    value: Function
    first: Function
    second: Function
    first_bound: float
    second_bound: float


def _density(z: Entries) -> Entries:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def _tanh_parts(z: Entries) -> tuple[Entries, Entries, Entries, Entries]:
    """tanh u, 1 − tanh² u, u' and u'' for u = √(2/π)(z + 0.044715 z³). z is clamped to ±30, where tanh is constant."""
    z = z.clamp(-30, 30)
    scale = math.sqrt(2 / math.pi)
    u = scale * (z + 0.044715 * z**3)
    cosh = torch.cosh(u.clamp(-300, 300))
    return torch.tanh(u), 1 / cosh.square(), scale * (1 + 0.134145 * z.square()), scale * 0.26829 * z


def _tanh_value(z: Entries) -> Entries:
    t, _, _, _ = _tanh_parts(z)
    return z * (1 + t) / 2


def _tanh_first(z: Entries) -> Entries:
    t, decay, du, _ = _tanh_parts(z)
    return (1 + t) / 2 + z.clamp(-30, 30) * decay * du / 2


def _tanh_second(z: Entries) -> Entries:
    t, decay, du, ddu = _tanh_parts(z)
    return decay * du + z.clamp(-30, 30) * decay * (ddu - 2 * t * du.square()) / 2


def _silu_first(z: Entries) -> Entries:
    s = torch.sigmoid(z)
    return s * (1 + z * torch.sigmoid(-z))


def _silu_second(z: Entries) -> Entries:
    s, left = torch.sigmoid(z), torch.sigmoid(-z)
    return s * left * (2 + z * (left - s))


def _gelu_second(z: Entries) -> Entries:
    z = z.clamp(-40, 40)
    return _density(z) * (2 - z.square())


ACTIVATIONS = {
    "relu": Activation("relu", torch.relu, lambda z: (z > 0).to(z.dtype), torch.zeros_like, 1.0, 0.0),
    "gelu": Activation(
        "gelu",
        lambda z: z * torch.special.ndtr(z),
        lambda z: torch.special.ndtr(z) + z * _density(z),
        _gelu_second,
        1.1290,
        0.7979,
    ),
    "gelu_tanh": Activation("gelu_tanh", _tanh_value, _tanh_first, _tanh_second, 1.1290, 0.7979),
    "silu": Activation("silu", lambda z: z * torch.sigmoid(z), _silu_first, _silu_second, 1.0999, 0.5),
    "identity": Activation("identity", lambda z: z, torch.ones_like, torch.zeros_like, 1.0, 0.0),
}
"""By name. ReLU has φ'(0) = 0, as torch, and φ'' = 0: its kink has no second derivative."""


def activation(name: str) -> Activation:
    """One of `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise CurvlensError(f"activation={name!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}.")
    return ACTIVATIONS[name]
