"""The linear network F(x) = W^D ⋯ W^1 x with square loss, which the paper compares attention with (Section 2).

With A_i = W^D ⋯ W^{i+1} after layer i, b_i = W^{i−1} ⋯ W^1 x before it, and the gradient g = c (F − Y) at the output,

    outer (i, j)              c A_iᵀ A_j ⊗ Σ_n b_i b_jᵀ
    functional (i, j), i < j  [(a, d), (c, e)] = (W^{j−1} ⋯ W^{i+1})[e, a] (Σ_n b_i gᵀ A_j)[d, c] .

The functional part is block-hollow: its diagonal blocks are zero. At any depth the outer part grows with the square of
the data. The functional part grows linearly if the residual tends to a constant for small data, and with the square if
the residual scales with the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.form import Form, Split
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.tensor_checks import alike
from curvlens.calculus.terms import Pair, Term
from curvlens.errors import CurvlensError, a_kind


class LinearMLPHessian(Split):
    """``.outer``, ``.functional`` and ``.total``, with blocks ``W1 W2 …``, each weight in row-vec."""

    def __init__(self, X: Tensor, weights: Sequence[Tensor], gradient: Tensor, c: float) -> None:
        self.weights = list(weights)
        shapes = {f"W{i + 1}": (w.shape[0], w.shape[1]) for i, w in enumerate(weights)}
        number, network = {name: i for i, name in enumerate(shapes)}, _Network(X, self.weights, gradient, c)

        def outer(first: str, second: str) -> list[Term]:
            return network.outer(number[first], number[second])

        def functional(first: str, second: str) -> list[Term]:
            return network.functional(number[first], number[second])

        title = "{} part of a linear network's Hessian"
        self.outer = Form(shapes, outer, X, title.format("Outer"))
        self.functional = Form(shapes, functional, X, title.format("Functional"))
        self.total = Form(shapes, lambda a, b: [*outer(a, b), *functional(a, b)], X, "Hessian of a linear network")

    def __repr__(self) -> str:
        return f"LinearMLPHessian({self.total!r})"


class _Network:
    """The quantities that its blocks consist of."""

    def __init__(self, X: Tensor, weights: Sequence[Tensor], gradient: Tensor, c: float) -> None:
        self.weights, self.gradient, self.c = weights, gradient, c
        self.before = [X]  # b_i as rows, (n, ·)
        for weight in weights[:-1]:
            self.before.append(self.before[-1] @ weight.T)
        self.behind = [torch.eye(weights[-1].shape[0], dtype=X.dtype, device=X.device)]  # A_i
        for weight in reversed(weights[1:]):
            self.behind.insert(0, self.behind[0] @ weight)

    def outer(self, i: int, j: int) -> list[Term]:
        """c A_iᵀ A_j ⊗ Σ_n b_i b_jᵀ."""
        return [Pair(self.c * self.behind[i].T @ self.behind[j], self.before[i].T @ self.before[j], "ac", "de")]

    def functional(self, i: int, j: int) -> list[Term]:
        """⟨g, A_j Ẇ^j M Ẇ^i b_i⟩ with M = W^{j−1} ⋯ W^{i+1}: [a, d] is the entry of Ẇ^i, [c, e] that of Ẇ^j."""
        if i == j:
            return []
        between = torch.eye(self.weights[i].shape[0], dtype=self.gradient.dtype, device=self.gradient.device)
        for weight in self.weights[i + 1 : j]:
            between = weight @ between
        return [Pair(between, self.before[i].T @ self.gradient @ self.behind[j], "ea", "dc")]


@in_own_dtype
def hessian(
    X: Float[Tensor, "*batch d"],
    weights: Sequence[Tensor],
    target: Float[Tensor, "*batch d_out"],
) -> LinearMLPHessian:
    """The Hessian of ℓ = ‖F − Y‖² divided by the number of entries of Y, for any depth.

    Args:
        X: Tokens, one in each row.
        weights: W^1 … W^D, each (out, in), as in F(x) = W^D ⋯ W^1 x.
        target: Y.
    """
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        given = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else a_kind(weights)
        raise CurvlensError(f"weights is {given}, expected a list of matrices: [W1, W2, …], or [W] for one layer.")
    if not weights:
        raise CurvlensError("A network needs at least one weight matrix.")
    alike({"X": X, **{f"W{i + 1}": w for i, w in enumerate(weights)}, "target": target})
    weights = [weight.detach().clone() for weight in weights]  # later writes must not matter
    rows = X.detach().clone().reshape(-1, X.shape[-1])
    out = rows
    for i, weight in enumerate(weights):
        if weight.ndim != 2 or weight.shape[1] != out.shape[-1]:
            raise CurvlensError(
                f"W{i + 1} has shape {tuple(weight.shape)}, expected (out, {out.shape[-1]}) to fit the layer before. "
                "Weights are (out, in) here, as in nn.Linear."
            )
        out = out @ weight.T
    if target.shape != (*X.shape[:-1], out.shape[-1]):
        raise CurvlensError(f"target has shape {tuple(target.shape)}, the output has {(*X.shape[:-1], out.shape[-1])}.")
    c = 2 / target.numel()
    return LinearMLPHessian(rows, weights, c * (out - target.detach().reshape(out.shape)), c)
