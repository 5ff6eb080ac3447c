"""A Transformer layer as primitives: attention and feed-forward, each with its norm and its residual sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvlens.assembly.circuit import Circuit, View
from curvlens.assembly.linear import Add, Keep, Merge, Shift, Split
from curvlens.assembly.norm import Norm
from curvlens.assembly.primitives import Activation, Bilinear, Primitive, Softmax
from curvlens.calculus.norms import Kind
from curvlens.errors import CurvlensError

Mask = str | Tensor | None
"""``"causal"``, None, or a boolean tensor (T, T) or (B, T, T), True where a query may attend."""


@dataclass(frozen=True)
class Multiply:
    """x W + b and the name of its part. The view of W has the inputs as rows."""

    name: str
    weight: View
    bias: View | None = None

    def on(self, circuit: Circuit, x: int) -> int:
        """Append its nodes for the state x and return the new state."""
        z = circuit.add(self.name, partial(Bilinear, "bti,io->bto"), x, self.weight)
        return z if self.bias is None else circuit.add(self.name, Shift, z, self.bias)


@dataclass(frozen=True)
class Normalisation:
    """γ∘n + β and the name of its part."""

    name: str
    scale: View | None
    shift: View | None
    eps: float
    kind: Kind

    def on(self, circuit: Circuit, x: int) -> int:
        """Append its nodes for the state x and return the new state."""
        given = [] if self.scale is None else [view for view in (self.scale, self.shift) if view is not None]
        y = circuit.add(self.name, partial(Norm, eps=self.eps, kind=self.kind), x, *given)
        return y if given or self.shift is None else circuit.add(self.name, Shift, y, self.shift)


@dataclass(frozen=True)
class Attention:
    """Σ_h softmax(τ Q_h K_hᵀ) V_h, followed by W_O; ``linear`` leaves the softmax out."""

    name: str
    q: Multiply
    k: Multiply
    v: Multiply
    o: Multiply | None
    heads: int
    scale: float
    mask: Mask = None
    linear: bool = False

    def on(self, circuit: Circuit, x: int) -> int:
        """Append its nodes for the state x and return the new state."""
        split = partial(Split, heads=self.heads)
        q, k, v = (circuit.add(p.name, split, p.on(circuit, x)) for p in (self.q, self.k, self.v))
        scores = circuit.add(f"{self.name}.scores", partial(Bilinear, "bhte,bhse->bhts", scale=self.scale), q, k)
        if not self.linear:
            scores = circuit.add(f"{self.name}.softmax", partial(_attend, mask=self.mask), scores)
        elif self.mask is not None:
            scores = circuit.add(f"{self.name}.mask", partial(_keep, mask=self.mask), scores)
        mixed = circuit.add(f"{self.name}.mix", partial(Bilinear, "bhts,bhse->bhte"), scores, v)
        merged = circuit.add(f"{self.name}.mix", Merge, mixed)
        return merged if self.o is None else self.o.on(circuit, merged)


@dataclass(frozen=True)
class FeedForward:
    """φ(x W_up) W_down, or (φ(x W_gate) ∘ x W_up) W_down."""

    name: str
    up: Multiply
    down: Multiply
    activation: str
    gate: Multiply | None = None
    inside: str | None = None
    """The name of the activation's part; by default the name of the layer with ``.activation`` appended."""

    def on(self, circuit: Circuit, x: int) -> int:
        """Append its nodes for the state x and return the new state."""
        phi, inside = partial(Activation, kind=self.activation), self.inside or _inside(self.name, "activation")
        if self.gate is None:
            h = circuit.add(inside, phi, self.up.on(circuit, x))
        else:
            opened = circuit.add(inside, phi, self.gate.on(circuit, x))
            times = partial(Bilinear, "bti,bti->bti")
            h = circuit.add(_inside(self.name, "gating"), times, opened, self.up.on(circuit, x))
        return self.down.on(circuit, h)


@dataclass(frozen=True)
class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); with ``post`` norm(x + attention(x)), then norm(x + mlp(x))."""

    attention: Attention
    norm1: Normalisation | None = None
    mlp: FeedForward | None = None
    norm2: Normalisation | None = None
    post: bool = False
    skip: bool = True
    """Whether attention has a residual sum."""

    def on(self, circuit: Circuit, x: int) -> int:
        """Append its nodes for the state x and return the new state."""
        x = self._half(circuit, x, self.attention, self.norm1, self.skip)
        return x if self.mlp is None else self._half(circuit, x, self.mlp, self.norm2, True)

    def _half(
        self, circuit: Circuit, x: int, f: Attention | FeedForward, norm: Normalisation | None, skip: bool
    ) -> int:
        before = x if self.post or norm is None else norm.on(circuit, x)
        made = f.on(circuit, before)
        total = circuit.add("", Add, x, made) if skip else made
        return norm.on(circuit, total) if self.post and norm is not None else total


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _allowed(scores: Tensor, mask: Mask) -> Tensor | None:
    """Which keys a query may attend to, in a shape that fits scores (B, heads, T, T)."""
    if mask is None:
        return None
    if isinstance(mask, str):
        return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    samples, _, *square = scores.shape
    if tuple(mask.shape) not in (tuple(square), (samples, *square)):
        raise CurvlensError(
            f"The mask has shape {tuple(mask.shape)}, expected {tuple(square)} or {(samples, *square)}."
        )
    return mask if mask.ndim == 2 else mask[:, None]


def _attend(scores: Tensor, mask: Mask) -> Primitive:
    return Softmax(scores, _allowed(scores, mask))


def _keep(scores: Tensor, mask: Mask) -> Primitive:
    allowed = _allowed(scores, mask)
    assert allowed is not None
    return Keep(scores, allowed)
