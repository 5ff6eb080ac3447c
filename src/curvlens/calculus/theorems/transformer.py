"""The second paper: the spectral bound of attention, LayerNorm over a matrix of tokens, and the feed-forward block.

Row-vec throughout. X is (L, d), C = I − 11ᵀ/d, D = diag(1/s_i), N = D X C the normalised tokens. * is the Khatri–Rao
product of rows: row i of I * N is e_i ⊗ n_i, and (I * N)ᵀ(I * N) is the block diagonal matrix of the n_i n_iᵀ.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention import forward
from curvlens.calculus.feedforward import fit
from curvlens.calculus.norms import normed, require_fit
from curvlens.calculus.tensor_checks import alike
from curvlens.calculus.theorems.self_attention import check_matrices
from curvlens.calculus.vec import identity, khatri_rao, kron
from curvlens.errors import CurvlensError

Tokens = Float[Tensor, "l d"]
Square = Float[Tensor, "n n"]


def _require_matrix(X: Tensor, scale: Tensor | None = None, **directions: Tensor) -> None:
    """Check that X is one sample, (L, d)."""
    require_fit(X, scale, **directions)
    if X.ndim != 2:
        hint = " One token is x[None]." if X.ndim == 1 else " Of several samples, take one at a time."
        raise CurvlensError(f"X has shape {tuple(X.shape)}, expected (tokens, features).{hint}")


def _parts(X: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """I * N, the diagonal of D, and C."""
    found = normed(X, eps=eps)
    rows, d = X.shape
    return khatri_rao(identity(rows, X), found.n, rows=rows), 1 / found.s.squeeze(-1), identity(d, X) - 1 / d


def theorem_1(
    X: Tokens,
    WQ: Float[Tensor, "d k"],
    WK: Float[Tensor, "d k"],
    WV: Float[Tensor, "d v"],
    target: Float[Tensor, "l v"],
) -> dict[str, float]:
    """The spectral bound of one self-attention layer with the square loss: ‖H‖₂ ≤ M, and one term for each block.

    M is 3 times the largest term: a symmetric 3 × 3 matrix of numbers from 0 to m has a norm of at most 3 m.

    The theorem is about the layer alone, with a term for every pair of Q, K and V. Our copy of the paper says so, but
    the formula itself is missing in it. So the terms and M are derived here, from ‖D softmax‖ ≤ 1/2, ‖D² softmax‖ ≤
    √6/9 and ‖A‖₂ ≤ √L (`docs/explanation/math.md`, "Bounds"). They are valid, but neither confirm nor correct the
    printed constants. `curvlens.calculus.bounds.attention` takes the norm of the matrix of the terms, which is never
    larger than M. For a whole block, with norms and skips, use `curvlens.calculus.bounds.block`.
    """
    check_matrices(X, WV, target, WQ=WQ, WK=WK)
    L, d_V, d_K = X.shape[0], WV.shape[1], WQ.shape[1]
    R = forward(X, WQ, WK, WV) - target
    x, q, k, v, r = (float(torch.linalg.matrix_norm(t, 2)) for t in (X, WQ, WK, WV, R))
    row, frobenius = float(R.norm(dim=1).max()), float(R.norm())
    c, kappa = 2 / (L * d_V), 6**0.5 / 9
    blocks = {
        "QQ": c * (x**6 * k**2 * v**2 / (4 * d_K) + kappa * row * x**5 * k**2 * v / d_K),
        "QK": c
        * (
            x**6 * q * k * v**2 / (4 * d_K)
            + kappa * row * x**5 * q * k * v / d_K
            + frobenius * x**3 * v / (2 * d_K**0.5)
        ),
        "KK": c * (x**6 * q**2 * v**2 / (4 * d_K) + kappa * row * x**5 * q**2 * v / d_K),
        "VQ": c * (L**0.5 * x**4 * k * v + r * x**3 * k) / (2 * d_K**0.5),
        "VK": c * (L**0.5 * x**4 * q * v + r * x**3 * q) / (2 * d_K**0.5),
        "VV": c * L * x**2,
    }
    return {**blocks, "M": 3 * max(blocks.values())}


def theorem_2(X: Tokens, scale: Float[Tensor, " d"] | None = None, *, eps: float = 1e-5) -> Square:
    """The Jacobian of LayerNorm, (I ⊗ diag γ)(D ⊗ C − (I * N)ᵀ D (I * N)/d).

    The term with N comes from the derivative of D. Without it, as in some published code, the Jacobian of a random
    token is wrong by tens of percent.
    """
    _require_matrix(X, scale)
    n, inverse, c = _parts(X, eps)
    d = X.shape[1]
    plain = kron(inverse.diag(), c) - n.T @ inverse.diag() @ n / d
    return plain if scale is None else kron(identity(X.shape[0], X), scale.diag()) @ plain


def theorem_3(X: Tokens, grad: Tokens, scale: Float[Tensor, " d"] | None = None, *, eps: float = 1e-5) -> Square:
    """The second derivative of LayerNorm contracted with a gradient G of its output, over all tokens.

    −[(I * P)ᵀ D² (I * N) + (I * N)ᵀ D² (I * P) + Θ D² ⊗ C − (3/d)(I * N)ᵀ Θ D² (I * N)]/d with P = (G diag γ) C and Θ =
    diag(p_i · n_i). It is block diagonal: LayerNorm couples the entries of one token, but not different tokens.
    """
    _require_matrix(X, scale, grad=grad)
    n, inverse, c = _parts(X, eps)
    rows, d = X.shape
    pulled = (grad if scale is None else grad * scale) @ c
    p = khatri_rao(identity(rows, X), pulled, rows=rows)
    squares = inverse.square()
    theta = squares * (pulled * normed(X, eps=eps).n).sum(-1)
    cross = p.T @ squares.diag() @ n
    return -(cross + cross.T + kron(theta.diag(), c) - 3 / d * n.T @ theta.diag() @ n) / d


def lemma_1(Z: Float[Tensor, "l m"]) -> Float[Tensor, "n n"]:
    """The Jacobian of a ReLU, diag(vec(Z > 0)). Its second derivative is zero, and does not exist at the kink."""
    return (Z > 0).to(Z.dtype).reshape(-1).diag()


def theorem_4(X: Tokens, up: Float[Tensor, "d m"], down: Float[Tensor, "m o"]) -> dict[str, Float[Tensor, "_ _"]]:
    """The Jacobians of X + relu(X W_up) W_down by W_up, W_down and X.

    ∂/∂W_down = relu(X W_up) ⊗ I, ∂/∂W_up = (I ⊗ W_downᵀ) J (X ⊗ I) and ∂/∂X = I + (I ⊗ W_downᵀ) J (I ⊗ W_upᵀ) with the
    Jacobian J of the ReLU; the residual adds the identity.
    """
    alike({"X": X, "up": up, "down": down})
    _require_matrix(X)
    fit(X, {"up": up, "down": down})
    rows, d = X.shape
    if down.shape[1] != d:
        raise CurvlensError(f"down has shape {tuple(down.shape)}, expected {(up.shape[1], d)}: the residual adds X.")
    z = X @ up
    back = kron(identity(rows, X), down.T) @ lemma_1(z)
    return {
        "down": kron(torch.relu(z), identity(down.shape[1], X)),
        "up": back @ kron(X, identity(up.shape[1], X)),
        "X": identity(rows * d, X) + back @ kron(identity(rows, X), up.T),
    }
