"""Pure mathematics: tensors in, tensors out. No module, no autograd."""

from curvlens.calculus import (
    attention,
    exponents,
    linear_mlp,
    losses,
    moments,
    scalar_attention,
    softmax,
    theorems,
    vec,
)

__all__ = [
    "attention",
    "exponents",
    "linear_mlp",
    "losses",
    "moments",
    "scalar_attention",
    "softmax",
    "theorems",
    "vec",
]
