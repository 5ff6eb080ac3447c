"""The Hessian of one self-attention layer with square loss, in the Kronecker forms of the paper.

F = A X W_V, A = softmax(X W_Q W_Kᵀ Xᵀ/√d_K), ℓ = ‖F − Y‖²/(L d_V), c = 2/(L d_V). Blocks are named by two letters.
The paper leaves out the key blocks. They are added here, with P_Q = I ⊗ W_K and P_K = (W_Q ⊗ I) K_{d_K,d}, the
derivatives of W_Q W_Kᵀ. The paper has tokens and outputs of one width; here W_V may be (d, d_V) with d_V ≠ d.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.moments import z1, z2
from curvlens.calculus.softmax import jacobian, second_derivative
from curvlens.calculus.tensor_checks import alike
from curvlens.calculus.vec import commutation, identity, kron, residual, shuffle, vec
from curvlens.errors import CurvlensError, a_kind

Tokens = Float[Tensor, "l d"]
Query = Float[Tensor, "d k"]
Square = Float[Tensor, "d d"]
Value = Float[Tensor, "d v"]
Outputs = Float[Tensor, "l v"]
Blocks = dict[tuple[str, str], Float[Tensor, "_ _"]]


def _attention(X: Tensor, WQ: Tensor, WK: Tensor) -> Tensor:
    scores: Tensor = X @ WQ @ WK.T @ X.T / WQ.shape[1] ** 0.5
    return scores.softmax(-1)


def check_matrices(X: Tensor, WV: Tensor | None = None, Y: Tensor | None = None, **score: Tensor) -> None:
    """Check one sample and one head: X (L, d), W_Q and W_K (d, d_K) or W_QK (d, d), W_V (d, d_V), Y (L, d_V)."""
    named = {"X": X, **score, "WV": WV, "Y": Y}
    for name, given in named.items():
        if isinstance(given, (tuple, list)):
            raise CurvlensError(f"{name} is {a_kind(given)}, expected one matrix: multiply a pair, down @ up.")
    tensors = {name: given for name, given in named.items() if given is not None}
    alike(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in shapes.items():
        if len(shape) != 2:
            raise CurvlensError(
                f"{name} has shape {shape}, expected a matrix: the theorems are of one sample and one head. "
                "curvlens.calculus.attention.hessian takes batches and heads."
            )
    length, d = shapes["X"]
    for name, shape in shapes.items():
        if name not in ("X", "Y") and shape[0] != d:
            raise CurvlensError(
                f"X has shape {shapes['X']}, {name} has {shape}, expected ({d}, …): weights are (in, out). nn.Linear "
                "stores (out, in): give its weight.T."
            )
    if "WQ" in shapes and shapes["WQ"] != shapes["WK"]:
        raise CurvlensError(f"WQ has shape {shapes['WQ']}, WK has {shapes['WK']}: they must be equal.")
    if "WQK" in shapes and shapes["WQK"] != (d, d):
        raise CurvlensError(f"WQK has shape {shapes['WQK']}, expected ({d}, {d}): it replaces W_Q W_Kᵀ.")
    if "Y" in shapes and shapes["Y"] != (length, shapes["WV"][1]):
        raise CurvlensError(
            f"Y has shape {shapes['Y']}, the output X W_V has {(length, shapes['WV'][1])}: they must be equal."
        )


def _scale(X: Tensor, WV: Tensor) -> float:
    """c = 2/(L d_V)."""
    return 2 / (X.shape[0] * WV.shape[1])


def _by_query(WK: Tensor) -> Tensor:
    """P_Q = I ⊗ W_K, the derivative of W_Q W_Kᵀ by W_Q."""
    return kron(identity(WK.shape[0], WK), WK)


def _by_key(WQ: Tensor) -> Tensor:
    """P_K = (W_Q ⊗ I) K_{d_K,d}, the derivative of W_Q W_Kᵀ by W_K."""
    d, k = WQ.shape
    return kron(WQ, identity(d, WQ)) @ commutation(k, d, WQ)


def lemma_b_1(X: Tokens, WQ: Query, WK: Query, WV: Value) -> dict[str, Float[Tensor, "_ _"]]:
    """The Jacobians ∂F/∂W_V = A X ⊗ I and ∂F/∂W_Q = (I ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X ⊗ X W_K)/√d_K; and that by W_K."""
    check_matrices(X, WV, WQ=WQ, WK=WK)
    a = _attention(X, WQ, WK)
    front = kron(identity(X.shape[0], X), WV.T @ X.T) @ jacobian(a) / WQ.shape[1] ** 0.5
    key = kron(X @ WQ, X) @ commutation(WQ.shape[1], WQ.shape[0], X)
    return {"V": kron(a @ X, identity(WV.shape[1], X)), "Q": front @ kron(X, X @ WK), "K": front @ key}


def theorem_3_1(X: Tokens, WQ: Query, WK: Query, WV: Value) -> Blocks:
    """The outer-product Hessian. As printed, with the key blocks added."""
    check_matrices(X, WV, WQ=WQ, WK=WK)
    a = _attention(X, WQ, WK)
    c, d_k = _scale(X, WV), WQ.shape[1]
    m1, z = a @ X, z1(a, X)
    p_q, p_k = _by_query(WK), _by_key(WQ)
    c1 = z.T @ kron(identity(X.shape[0], X), WV @ WV.T) @ z
    value = kron(m1.T, WV.T) @ z
    return {
        ("V", "V"): c * kron(m1.T @ m1, identity(WV.shape[1], X)),
        ("Q", "Q"): c / d_k * p_q.T @ c1 @ p_q,
        ("V", "Q"): c / d_k**0.5 * value @ p_q,
        ("Q", "K"): c / d_k * p_q.T @ c1 @ p_k,
        ("K", "K"): c / d_k * p_k.T @ c1 @ p_k,
        ("V", "K"): c / d_k**0.5 * value @ p_k,
    }


def theorem_3_2(X: Tokens, WQ: Query, WK: Query, WV: Value, Y: Outputs) -> Blocks:
    """The functional Hessian. As printed, with the key blocks added; that of W_V with itself is zero."""
    check_matrices(X, WV, Y, WQ=WQ, WK=WK)
    a = _attention(X, WQ, WK)
    (length, d), (d_k, d_v), c = X.shape, (WQ.shape[1], WV.shape[1]), _scale(X, WV)
    difference = a @ X @ WV - Y
    tokens = identity(length, X)
    p_q, p_k = _by_query(WK), _by_key(WQ)
    c2 = residual(difference, d * d) @ kron(tokens, WV.T, identity(d * d, X)) @ z2(a, X)
    value = residual(difference, d * d_v) @ kron(tokens, shuffle(d, X, d_v)) @ z1(a, X)
    b = _gradient(a, X, WV, difference)
    # Printed with R_{d_V d_K}(I ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) in front. Here W_K is moved to the left, which is equal.
    return {
        ("V", "V"): X.new_zeros(d * d_v, d * d_v),
        ("Q", "Q"): c / d_k * p_q.T @ c2 @ p_q,
        ("V", "Q"): c / d_k**0.5 * value @ p_q,
        ("Q", "K"): c / d_k * p_q.T @ c2 @ p_k + c / d_k**0.5 * kron(b, identity(d_k, X)),
        ("K", "K"): c / d_k * p_k.T @ c2 @ p_k,
        ("V", "K"): c / d_k**0.5 * value @ p_k,
    }


def _gradient(a: Tensor, X: Tensor, WV: Tensor, difference: Tensor) -> Tensor:
    """B = R_{d_V}(I ⊗ W_Vᵀ ⊗ I)(Z1 ⊗ I) S (Remark D.1), without the factor c."""
    (length, d) = X.shape
    eye = identity(d, X)
    front = residual(difference, d) @ kron(identity(length, X), WV.T, eye)
    return front @ kron(z1(a, X), eye) @ shuffle(d, X)


def lemma_4_1(X: Tokens, WQK: Square, WV: Value, Y: Outputs) -> Float[Tensor, "dd dd"]:
    """The Hessian by one matrix W_QK, T = X W_QK Xᵀ: c U, U = Z1ᵀ(I ⊗ W_V W_Vᵀ)Z1 + (vec(F−Y)ᵀ(I ⊗ W_Vᵀ) ⊗ I) Z2.

    Corrected: the factor c = 2/(L d_V) is missing in print.
    """
    check_matrices(X, WV, Y, WQK=WQK)
    a = (X @ WQK @ X.T).softmax(-1)
    return _scale(X, WV) * _u(a, X, WV, a @ X @ WV - Y)


def _u(a: Tensor, X: Tensor, WV: Tensor, difference: Tensor) -> Tensor:
    tokens, z = identity(X.shape[0], X), z1(a, X)
    front = vec(difference)[None, :] @ kron(tokens, WV.T)
    return z.T @ kron(tokens, WV @ WV.T) @ z + kron(front, identity(X.shape[1] ** 2, X)) @ z2(a, X)


def remark_3_1(X: Tokens, WQ: Query, WK: Query) -> tuple[Float[Tensor, "_ _"], Float[Tensor, "_ _"]]:
    """Z1 = X * M2 and Z2 = (I ⊗ K ⊗ I)(vec X * X * M3).

    Corrected: printed is X * Xᵀ * M3, which is not defined; the proof's blocks are x_i x_iᵀ ⊗ M3_i.
    """
    check_matrices(X, WQ=WQ, WK=WK)
    a = _attention(X, WQ, WK)
    return z1(a, X), z2(a, X)


def remark_4_1(X: Tokens, WQ: Query, WK: Query, WV: Value, Y: Outputs) -> tuple[Blocks, Blocks]:
    """Outer and functional Hessian of linear attention, A = X W_Q W_Kᵀ Xᵀ/√d_K, without a mask. As printed, keys added.

    Σ = XᵀX/L, Ω = Xᵀ(F − Y)/L. With a mask Σ differs between tokens: use `curvlens.calculus.attention`.
    """
    check_matrices(X, WV, Y, WQ=WQ, WK=WK)
    (length, d), d_k, d_v = X.shape, WQ.shape[1], WV.shape[1]
    difference = X @ WQ @ WK.T @ X.T @ X @ WV / d_k**0.5 - Y
    sigma, omega = X.T @ X / length, X.T @ difference / length
    c, k = 2 * length**2 / (d_v * d_k), 2 * length / (d_v * d_k**0.5)
    inner = sigma @ WV @ WV.T @ sigma
    outside = sigma @ WK @ WQ.T @ sigma
    transposed = commutation(d_k, d, X)
    outer = {
        ("V", "V"): c * kron(outside @ WQ @ WK.T @ sigma, identity(d_v, X)),
        ("Q", "Q"): c * kron(sigma, WK.T @ inner @ WK),
        ("V", "Q"): c * kron(outside, WV.T @ sigma @ WK),
        ("Q", "K"): c * kron(sigma @ WQ, WK.T @ inner) @ transposed,
        ("K", "K"): c * kron(inner, WQ.T @ sigma @ WQ),
        ("V", "K"): c * kron(outside @ WQ, WV.T @ sigma) @ transposed,
    }
    delta = vec(difference)[None, :]
    front = kron(delta, identity(d * d_v, X)) @ kron(identity(length, X), shuffle(d, X, d_v))
    product = kron(delta @ kron(X, WV.T @ sigma), identity(d, X)) @ shuffle(d, X)
    functional = {
        ("V", "V"): torch.zeros_like(outer["V", "V"]),
        ("Q", "Q"): torch.zeros_like(outer["Q", "Q"]),
        ("K", "K"): torch.zeros_like(outer["K", "K"]),
        ("V", "Q"): 2 / (d_v * d_k**0.5) * front @ kron(X, sigma @ WK),
        ("Q", "K"): 2 / (d_v * d_k**0.5) * kron(product, identity(d_k, X)),
        ("V", "K"): k * torch.einsum("ac,db->abcd", sigma, WQ.T @ omega).reshape(d * d_v, d * d_k),
    }
    return outer, functional


def lemma_c_1(A: Float[Tensor, "l l"]) -> Float[Tensor, "_ _"]:
    """∂²A/∂T∂T of the softmax of rows. Corrected: the left side is printed as ∂²F/∂T∂T."""
    return second_derivative(A)


def remark_c_1(A: Float[Tensor, "2 2"]) -> Float[Tensor, "16 4"]:
    """The second derivative for L = 2, entry by entry, with b_ij = 1 − 2 a_ij."""
    out = A.new_zeros(16, 4)
    for i in range(2):
        (a1, a2), (b1, b2) = A[i], 1 - 2 * A[i]
        cross = -a1 * a2
        first = torch.stack([torch.stack([(a1 - a1**2) * b1, cross * b1]), torch.stack([cross * b1, cross * b2])])
        second = torch.stack([torch.stack([cross * b1, cross * b2]), torch.stack([cross * b2, (a2 - a2**2) * b2])])
        for j, block in enumerate((first, second)):
            row = 8 * i + 4 * j + 2 * i
            out[row : row + 2, 2 * i : 2 * i + 2] = block
    return out


def remark_d_1(
    X: Tokens,
    WQ: Query,
    WK: Query,
    WV: Value,
    Y: Outputs,
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """T-outer and T-functional part of the (Q, K) Hessian: c/d_K Vᵀ U V, and c/√d_K [[0, B], [Bᵀ, 0]] ⊗ I.

    Corrected: both terms lack the factor c = 2/(L d_V) in print, and their blocks are in different orders. Here V =
    [P_Q P_K], and the order is (Q, K) in both.
    """
    check_matrices(X, WV, Y, WQ=WQ, WK=WK)
    a = _attention(X, WQ, WK)
    c, d_k = _scale(X, WV), WQ.shape[1]
    difference = a @ X @ WV - Y
    v = torch.cat([_by_query(WK), _by_key(WQ)], 1)
    b = _gradient(a, X, WV, difference)
    zero = torch.zeros_like(b)
    hollow = torch.cat([torch.cat([zero, b], 1), torch.cat([b.T, zero], 1)])
    return c / d_k * v.T @ _u(a, X, WV, difference) @ v, c / d_k**0.5 * kron(hollow, identity(d_k, X))


def lemma_d_2(d_V: int, d_K: int) -> int:
    """The bound on the rank of the T-outer part: 2 d_K d_V − d_K² for d_K < d_V, else d_V²."""
    return 2 * d_K * d_V - d_K**2 if d_K < d_V else d_V**2


def remark_e_1(
    X: Tokens,
    WQ: Float[Tensor, "h d k"],
    WK: Float[Tensor, "h d k"],
    WV: Float[Tensor, "h d v"],
) -> list[dict[str, Float[Tensor, "_ _"]]]:
    """The Jacobians of F = Σ_h A^h X W_V^h: those of each head alone (Lemma B.1)."""
    return [lemma_b_1(X, WQ[h], WK[h], WV[h]) for h in range(WQ.shape[0])]
