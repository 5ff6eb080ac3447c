"""Pure mathematics: tensors in, tensors out. No module, no autograd."""

from curvlens.calculus import (
    activations,
    attention,
    bounds,
    exponents,
    feedforward,
    linear_mlp,
    losses,
    moments,
    norms,
    scalar_attention,
    softmax,
    theorems,
    vec,
)

__all__ = [
    "activations",
    "attention",
    "bounds",
    "exponents",
    "feedforward",
    "linear_mlp",
    "losses",
    "moments",
    "norms",
    "scalar_attention",
    "softmax",
    "theorems",
    "vec",
]
