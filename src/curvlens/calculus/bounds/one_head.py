"""Norms of the quantities of one attention head, and the bounds that follow from them.

One head is o = A v with q = X W_Q, k = X W_K, v = X W_V and rows a_i of A. Along a direction a row of scores changes by
Ṫ_i = τ(k q̇_i + k̇ q_i). With B_i = diag a_i − a_i a_iᵀ, a gradient λ at o, w_i = B_i v λ_i the gradient at the scores
and B3_i = diag w_i − a_i w_iᵀ − w_i a_iᵀ,

    ȯ_i = vᵀ B_i Ṫ_i + v̇ᵀ a_i ,
    ⟨λ, ö⟩ = Σ_i Ṫ_iᵀ B3_i Ṫ_i + 2τ w_iᵀ k̇ q̇_i + 2 λ_iᵀ v̇ᵀ B_i Ṫ_i .

q̇, k̇ and v̇ are Ẋ W + X Ẇ. In the terms of Ẇ_K and Ẇ_V, X is multiplied with its neighbour: M2 = Xᵀ B X, Xᵀ B3 X and
similar products are bounded as a whole, not by the product of norms (`docs/explanation/math.md`, "Bounds").
"""

from __future__ import annotations

from typing import NamedTuple


class Head(NamedTuple):
    """Norms for one head. A name of several letters is the norm of a product, the largest over all rows i."""

    tau: float
    x: float
    q: float
    wq: float
    wk: float
    wv: float
    a: float
    ax: float
    b: float
    bx: float
    bk: float
    vb: float
    xbx: float
    xbk: float
    vbx: float
    vbk: float

    def first(self) -> dict[str, float]:
        """‖∂o/∂·‖."""
        moved = self.tau * (self.vbk * self.wq + self.vb * self.q * self.wk) + self.a * self.wv
        return {
            "X": moved,
            "Q": self.tau * self.vbk * self.x,
            "K": self.tau * self.vbx * self.q,
            "V": self.ax,
        }


class Bent(NamedTuple):
    """Norms for one head that depend on the gradient λ at its output; 3 stands for B3."""

    lam: float
    b3: float
    b3x: float
    kb3: float
    xb3x: float
    kb3x: float
    kb3k: float
    w: float
    wx: float
    xw: float
    xwx: float
    at_q: float
    at_k: float
    at_v: float

    def second(self, of: Head) -> dict[tuple[str, str], float]:
        """Bounds on the blocks of ⟨λ, D²o⟩."""
        t, x, q, lam = of.tau, of.x, of.q, self.lam
        qq = t**2 * self.kb3k
        qk, qk_x = t**2 * self.kb3 * q, t**2 * self.kb3x * q
        kk, kk_x, kk_xx = (t**2 * size * q**2 for size in (self.b3, self.b3x, self.xb3x))
        qv, qv_x = t * of.bk * lam, t * of.xbk * lam
        kv, kv_x, kv_xx = (t * size * lam * q for size in (of.b, of.bx, of.xbx))
        return {
            ("Q", "Q"): qq * x**2,
            ("Q", "K"): qk_x * x + t * self.xwx,
            ("K", "K"): kk_xx,
            ("Q", "V"): qv_x * x,
            ("K", "V"): kv_xx,
            ("X", "Q"): qq * of.wq * x + (qk * x + t * self.xw) * of.wk + qv * x * of.wv + self.at_q,
            ("X", "K"): (qk_x + t * self.wx) * of.wq + kk_x * of.wk + kv_x * of.wv + self.at_k,
            ("X", "V"): qv_x * of.wq + kv_x * of.wk + self.at_v,
            ("X", "X"): qq * of.wq**2
            + 2 * (qk + t * self.w) * of.wq * of.wk
            + kk * of.wk**2
            + 2 * (qv * of.wq + kv * of.wk) * of.wv,
        }
