"""Feed-forward layers, plain and gated: every block of the Hessian of a loss of their output.

Tokens are rows: y = h W_down + b, with h = φ(x W_up + b) or, gated, h = φ(x W_gate + b) ∘ (x W_up + b'). Both are one
formula: h depends on inner sums z_i = x W_i + b_i by its first derivatives h_i and its second derivatives h_ij, entry
by entry (`docs/explanation/math.md`, "Feed-forward"). With q = W_down g,

    (W_i, W_j) = Σ x ⊗ x ⊗ diag(q h_ij),    (W_i, W_down) = Σ x ⊗ g ⊗ diag(h_i),    (X, X) = Σ W_i diag(q h_ij) W_jᵀ.

A ReLU has h_ij = 0 almost everywhere. Its blocks (W_up, W_down) and those with the tokens are still not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.activations import activation as named
from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.output_loss import Outputs, output_loss
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.rowwise import RowwiseHessian, Slot, units
from curvlens.calculus.tensor_checks import alike
from curvlens.calculus.terms import Diagonal, Term, Tokens
from curvlens.errors import CurvlensError


@dataclass(frozen=True)
class Hidden:
    """h of every token, (N, m), its first derivatives by the inner sums, and its second."""

    h: Tensor
    first: dict[str, Tensor]
    second: dict[tuple[str, str], Tensor]
    """A missing pair is zero."""


def hidden(
    x: Tensor, up: Tensor, up_bias: Tensor | None, gate: Tensor | None, gate_bias: Tensor | None, name: str
) -> Hidden:
    """The hidden values h and their derivatives at tokens (N, d)."""
    phi = named(name)
    b = x @ up if up_bias is None else x @ up + up_bias
    if gate is None:
        second = phi.second(b)
        return Hidden(phi.value(b), {"up": phi.first(b)}, {("up", "up"): second})
    a = x @ gate if gate_bias is None else x @ gate + gate_bias
    value, first = phi.value(a), phi.first(a)
    return Hidden(
        value * b, {"gate": first * b, "up": value}, {("gate", "gate"): phi.second(a) * b, ("gate", "up"): first}
    )


def forward(
    X: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
) -> Float[Tensor, "*batch l o"]:
    """The output of the layer, (…, L, d_out)."""
    y = hidden(X, up, up_bias, gate, gate_bias, activation).h @ down
    return y if down_bias is None else y + down_bias


@in_own_dtype
def hessian(
    X: Tensor,
    up: Tensor,
    down: Tensor,
    target: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    grad: Tensor | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    wrt: str | None = None,
    reduction: str = "mean",
) -> RowwiseHessian:
    """The Hessian of a loss of a feed-forward layer's output, exact and without differentiation.

    Args:
        X: Tokens (…, L, d). Leading axes are samples; the loss is their mean.
        up: (d, m).
        down: (m, d_out).
        target: Y (…, L, d_out), for the square loss ‖y − Y‖²/(L d_out).
        gate: (d, m), for a gated layer: h = φ(X gate) ∘ (X up).
        up_bias: (m,). Without it (None) the bias is no variable. The same holds for ``gate_bias`` and ``down_bias``.
        gate_bias: (m,).
        down_bias: (d_out,).
        activation: "relu", "gelu", "gelu_tanh", "silu" or "identity".
        grad: For any other loss, ∂ℓ/∂y of each sample, (…, L, d_out).
        curvature: For that loss, the second derivative at every token, as in `curvlens.calculus.attention.hessian`.
        wrt: The variables as words, as in "up down X"; None for all weights.
        reduction: "mean" over the samples, or "sum".

    >>> X, W = torch.eye(3, 2), torch.eye(2)
    >>> H = hessian(X, W, W, target=torch.zeros(3, 2), activation="relu")
    >>> H.norm("up", "functional"), H.norm(("up", "down"), "functional") > 0
    (0.0, True)
    """
    given = {
        "gate": gate,
        "gate_bias": gate_bias,
        "up": up,
        "up_bias": up_bias,
        "down": down,
        "down_bias": down_bias,
    }
    weights = {name: t.detach().clone() for name, t in given.items() if t is not None}  # later writes must not matter
    alike({"X": X, **weights})
    fit(X, weights)
    names = _wanted(wrt, [*weights, "X"])
    x = X.detach().clone().reshape(-1, *X.shape[-2:])
    shape = (*x.shape[:2], down.shape[1])
    options = {name: t for name, t in weights.items() if name not in ("up", "down")}
    outputs = Outputs(
        lambda: forward(x, weights["up"], weights["down"], activation=activation, **options), shape, X.shape[:-2], x
    )
    loss = output_loss(outputs, target, grad, curvature, reduction)
    rows, g = x.flatten(0, 1), loss.gradient.flatten(0, 1)
    middle = hidden(
        rows, weights["up"], weights.get("up_bias"), weights.get("gate"), weights.get("gate_bias"), activation
    )
    layer = _Layer(rows, g, weights, middle)
    slots = {name: layer.slot(name) for name in names}
    return RowwiseHessian(slots, layer.functional, loss, "of a feed-forward layer")


class _Layer:
    """Slots and functional terms of a feed-forward layer."""

    def __init__(self, x: Tensor, g: Tensor, weights: dict[str, Tensor], middle: Hidden) -> None:
        self.x, self.g, self.weights, self.middle = x, g, weights, middle
        self.q = g @ weights["down"].mT
        self.one = x.new_ones(len(x), 1)
        self.unit = units(x)

    def slot(self, name: str) -> Slot:
        """∂y_n/∂W[a, d] = u_n[a] M_n[d]."""
        down, middle = self.weights["down"], self.middle
        if name == "down":
            return Slot((down.shape[0], down.shape[1]), middle.h, None)
        if name == "down_bias":
            return Slot((1, down.shape[1]), self.one, None)
        if name == "X":
            slope = sum((self.weights[i] * h[:, None, :] for i, h in middle.first.items()), self.x.new_zeros(()))
            return Slot((self.x.shape[0], self.x.shape[1]), self.unit, slope @ down)
        inner, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        u = self.one if is_bias else self.x
        return Slot((u.shape[1], down.shape[0]), u, middle.first[inner][..., None] * down)

    def second(self, i: str, j: str) -> Tensor | None:
        """q h_ij, or None for zero."""
        found = self.middle.second.get((i, j), self.middle.second.get((j, i)))
        return None if found is None else self.q * found

    def functional(self, first: str, second: str) -> list[Term]:
        """⟨g, ∂²y⟩ for two names in the order gate, up, down, X, where each bias follows its weight."""
        if first.startswith("down"):
            return [self._down_and_tokens()] if (first, second) == ("down", "X") else []
        if first == "X":
            return [Tokens(self.unit, self.unit, self._tokens(), "a", "c", "de", True)]
        inner = first.removesuffix("_bias")
        u = self.one if first.endswith("_bias") else self.x
        if second == "down":
            return [Diagonal(u, self.g, self.middle.first[inner], "a", "e", "dc")]
        if second == "down_bias":
            return []
        if second == "X":
            bent = [(w, p) for j, w in self._inner() if (p := self.second(inner, j)) is not None]
            matrix = sum((p[..., None] * w.mT for w, p in bent), self.x.new_zeros(()))
            terms: list[Term] = [Tokens(u, self.unit, matrix, "a", "c", "de")] if bent else []
            if u is self.x:  # ∂z/∂W contains x itself
                ones = torch.ones_like(self.x)
                terms.append(Diagonal(self.q * self.middle.first[inner], self.unit, ones, "d", "c", "ae"))
            return terms
        p = self.second(inner, second.removesuffix("_bias"))
        if p is None:
            return []
        w = self.one if second.endswith("_bias") else self.x
        return [Diagonal(u, w, p, "a", "c", "de")]

    def _inner(self) -> list[tuple[str, Tensor]]:
        return [(name, self.weights[name]) for name in self.middle.first]

    def _tokens(self) -> Tensor:
        """Σ_ij W_i diag(q h_ij) W_jᵀ, (N, d, d)."""
        total = self.x.new_zeros(self.x.shape[0], self.x.shape[1], self.x.shape[1])
        for i, first in self._inner():
            for j, second in self._inner():
                p = self.second(i, j)
                if p is not None:
                    total = total + (first * p[:, None, :]) @ second.mT
        return total

    def _down_and_tokens(self) -> Tokens:
        """Σ_n g_n[d] (Σ_i h_i[a] W_iᵀ[a, e]) e_n[c]."""
        slope = sum((h[..., None] * self.weights[i].mT for i, h in self.middle.first.items()), self.x.new_zeros(()))
        return Tokens(self.g, self.unit, slope, "d", "c", "ae")


def fit(x: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Check that the shapes of tokens and weights fit."""
    up, down = weights["up"], weights["down"]
    if x.ndim < 2 or up.ndim != 2 or down.ndim != 2:
        raise CurvlensError(
            f"X has shape {tuple(x.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}; expected (…, tokens, d), "
            "(d, m) and (m, d_out)."
        )
    wanted = {
        "up": (x.shape[-1], up.shape[1]),
        "gate": (x.shape[-1], up.shape[1]),
        "down": (up.shape[1], down.shape[1]),
        "up_bias": (up.shape[1],),
        "gate_bias": (up.shape[1],),
        "down_bias": (down.shape[1],),
    }
    for name, weight in weights.items():
        if tuple(weight.shape) != wanted[name]:
            hint = " Is it stored as nn.Linear does, outputs first? Give its transpose." if weight.ndim == 2 else ""
            raise CurvlensError(
                f"{name} has shape {tuple(weight.shape)}, expected {wanted[name]} beside X of shape {tuple(x.shape)} "
                f"and up of shape {tuple(up.shape)}.{hint}"
            )
    if "gate_bias" in weights and "gate" not in weights:
        raise CurvlensError("gate_bias was given without gate.")


def _wanted(wrt: str | None, known: list[str]) -> list[str]:
    if wrt is None:
        return [name for name in known if name != "X"]
    words = wrt.split()
    if not words or any(word not in known for word in words):
        raise CurvlensError(f"wrt={wrt!r}, expected words among {', '.join(known)}, as in 'up down X'.")
    return [name for name in known if name in words]
