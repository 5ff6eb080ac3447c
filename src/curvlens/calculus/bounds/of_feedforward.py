"""Bounds for a loss of the output of a feed-forward layer, plain or gated.

The hidden values h depend entry by entry on inner sums z_i = x W_i + b_i; h_i and h_ij are their derivatives
(`docs/explanation/math.md`, "Feed-forward"). Every block of the functional part is one matrix for each hidden unit or
for each token, or a product with the matrix g of gradients, so its norm can be bounded directly. With q = g W_downᵀ and
maxima over units k or tokens n,

    (W_i, W_j)  max_k ‖Xᵀ diag(q h_ij)_k X‖      (W_i, W_down)  max_k ‖Xᵀ diag(h_i)_k g‖
    (W_i, X)    ‖X‖ max_n ‖Σ_j W_j diag(q h_ij)_n‖ + ‖q∘h_i‖
    (W_down, X)  ‖g‖ max_n ‖Σ_i W_i diag(h_i)_n‖      (X, X)  max_n ‖Σ_ij W_i diag(q h_ij)_n W_jᵀ‖

Without data, |h_i| and |h_ij| are bounded by the largest values of φ' and φ''. Gated layers also need bounds on φ and
on the other inner sum; |φ(z)| ≤ |z| for every activation here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from curvlens.calculus.activations import activation as named
from curvlens.calculus.bounds.bound import Bound, in_range, selected
from curvlens.calculus.bounds.sizes import Local, Pairs, Sizes, matrix, one_sample, seen, sizes, spectral
from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.feedforward import fit, forward, hidden
from curvlens.calculus.output_loss import Outputs
from curvlens.calculus.tensor_checks import alike

Weights = Mapping[str, Tensor]


@in_range
def feedforward(
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
    grad: Tensor | float | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    wrt: str | None = None,
    data: bool = False,
) -> Bound:
    """A bound for one sample and a loss of a feed-forward layer's output.

    Weights as in `curvlens.calculus.feedforward.hessian`.

    Args:
        X: Tokens (L, d).
        up: (d, m).
        down: (m, d_out).
        target: Y (L, d_out), for the square loss ‖y − Y‖²/(L d_out).
        gate: (d, m), for a gated layer.
        up_bias: (m,). Without it (None) the bias is no variable. The same holds for ``gate_bias`` and ``down_bias``.
        gate_bias: (m,).
        down_bias: (d_out,).
        activation: "relu", "gelu", "gelu_tanh", "silu" or "identity".
        grad: For any other loss, ∂ℓ/∂y, (L, d_out); without ``data`` a bound on its norm is enough.
        curvature: For that loss, the second derivative at every token; a number c is also a bound on it.
        wrt: The variables as words, as in "up down X"; None for all weights.
        data: Use the hidden values, φ' and φ'' at the tokens. Otherwise only norms of weights, tokens and gradient.

    >>> X, W = torch.eye(3, 2), torch.eye(2)
    >>> bound = feedforward(X, W, W, torch.zeros(3, 2), activation="relu")
    >>> float(bound.functional[0, 0]), bound.block("up", "down") > 0
    (0.0, True)
    """
    optional = {"gate": gate, "gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    given = {"up": up, "down": down, **{name: t for name, t in optional.items() if t is not None}}
    alike({"X": X, **given})
    one_sample(X)
    fit(X, given)
    weights = {name: t.detach().double() for name, t in given.items()}
    x = X.detach().double()
    shape = (1, len(X), down.shape[1])
    outputs = Outputs(lambda: forward(x, **weights, activation=activation)[None].to(X.dtype), shape, (), X)
    loss = seen(outputs, target, grad, curvature, data=data)
    local: Local[Tensor] | Local[Sizes]
    if data:
        local = known(x, weights, activation)
        functional = local.bend(cast(Tensor, loss.gradient))
    else:
        local = prior(sizes(x), len(x), weights, activation)
        functional = local.bend(cast(Sizes, loss.gradient))
    names = [*ordered(weights), "X"]
    j = torch.tensor([local.first[name] for name in names], dtype=torch.float64)
    square = j[:, None] * j
    return selected(names, wrt, loss.outer * square, loss.rest * square + matrix(names, functional))


def ordered(weights: Weights) -> list[str]:
    """The names of the weights, in the order of the layer."""
    order = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias")
    return [name for name in order if name in weights]


def _inner(weights: Weights) -> list[str]:
    return [name for name in ("gate", "up") if name in weights]


def prior(x: Sizes, length: int, weights: Weights, activation: str) -> Local[Sizes]:
    """From norms of weights and sizes of tokens."""
    phi, root, inner = named(activation), math.sqrt(length), _inner(weights)
    size = {name: spectral(weights[name]) for name in (*inner, "down")}
    offset = {name: weights.get(f"{name}_bias", torch.zeros(1).double()) for name in (*inner, "down")}
    bias = {name: float(b.norm()) for name, b in offset.items()}
    entry = {i: x.row * float(weights[i].norm(dim=0).max()) + float(offset[i].abs().max()) for i in inner}
    row = x.row * size["up"] + bias["up"]
    total = x.total * size["up"] + root * bias["up"]
    if inner == ["up"]:
        h, hh = {"up": phi.first_bound}, {("up", "up"): phi.second_bound}
    else:
        row, total = row * entry["gate"], total * entry["gate"]
        h = {"gate": phi.first_bound * entry["up"], "up": entry["gate"]}
        hh = {("gate", "gate"): phi.second_bound * entry["up"], ("gate", "up"): phi.first_bound}
    slope, down = sum(h[i] * size[i] for i in inner), size["down"]
    widest = float(weights["down"].norm(dim=1).max())
    first = {"X": slope * down, "down": total, "down_bias": root}
    for i in inner:
        first |= {i: h[i] * x.spectral * down, f"{i}_bias": h[i] * root * down}

    def bend(grad: Sizes) -> Pairs:
        q, column = grad.row * widest, grad.spectral * widest  # bounds on the largest entry and longest column of q
        found = {("down", "X"): grad.spectral * slope, ("X", "X"): 0.0}
        for i in inner:
            beside = 0.0  # Σ_j |h_ij| ‖W_j‖
            for j in inner:
                second = hh.get((i, j), hh.get((j, i), 0.0))
                beside += second * size[j]
                found[i, j] = second * q * x.spectral**2
                found[i, f"{j}_bias"] = second * column * x.spectral
                found[f"{i}_bias", f"{j}_bias"] = second * column * root
            found["X", "X"] += q * size[i] * beside
            found[i, "X"] = x.spectral * q * beside + h[i] * grad.total * down
            found[f"{i}_bias", "X"] = column * beside
            found[i, "down"] = h[i] * x.spectral * grad.spectral
            found[f"{i}_bias", "down"] = h[i] * root * grad.spectral
        return found

    steep = first["X"]
    output = Sizes.at_most(total * down + root * bias["down"], row * down + bias["down"])
    return Local(output, first, bend, lambda g: Sizes.at_most(steep * g.total, steep * g.row))


def known(x: Tensor, weights: Weights, activation: str) -> Local[Tensor]:
    """From the hidden values and derivatives at the tokens."""
    inner, down = _inner(weights), weights["down"]
    middle = hidden(x, weights["up"], weights.get("up_bias"), weights.get("gate"), weights.get("gate_bias"), activation)
    w, h = spectral(down), middle.first
    into = sum((weights[i] * h[i][:, None, :] for i in inner), x.new_zeros(()))  # (n, d, m)
    jacobian = into @ down
    first = {"X": spectral(jacobian), "down": spectral(middle.h), "down_bias": math.sqrt(len(x))}
    for i in inner:
        first[i] = w * spectral(h[i].mT[..., None] * x)
        first[f"{i}_bias"] = w * float(h[i].norm(dim=0).max())

    def bend(grad: Tensor) -> Pairs:
        q, g = grad @ down.mT, spectral(grad)
        found = {("down", "X"): g * spectral(into)}
        both = x.new_zeros(len(x), x.shape[1], x.shape[1])
        for i in inner:
            beside = x.new_zeros(into.shape)  # Σ_j W_j diag(q h_ij)
            for j in inner:
                second = middle.second.get((i, j), middle.second.get((j, i)))
                if second is None:
                    continue
                p = q * second
                beside = beside + weights[j] * p[:, None, :]
                found[i, j] = spectral(torch.einsum("nk,na,nb->kab", p, x, x))
                found[i, f"{j}_bias"] = float((x.mT @ p).norm(dim=0).max())
                found[f"{i}_bias", f"{j}_bias"] = float(p.sum(0).abs().max())
            both = both + beside @ weights[i].mT
            found[i, "X"] = spectral(x) * spectral(beside) + spectral(q * h[i])
            found[f"{i}_bias", "X"] = spectral(beside.flatten(0, 1))
            found[i, "down"] = spectral(torch.einsum("nk,na,ne->kae", h[i], x, grad))
            found[f"{i}_bias", "down"] = float((h[i].mT @ grad).norm(dim=1).max())
        return found | {("X", "X"): spectral(both)}

    output = forward(x, **weights, activation=activation)
    return Local(output, first, bend, lambda g: (g[:, None, :] @ jacobian.mT).squeeze(1), jacobian)
