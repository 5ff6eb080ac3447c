"""Attention with scalar tokens, f = w_V A(x) x: the whole spectrum of the Hessian in closed form.

Scores are t x_i x_j + bias_ij with t = w_Q·w_K/√d_K, so the loss ⟨(w_V m − y)²⟩ depends on the 2 d_K + 1 weights
through w_V and t alone; ⟨·⟩ is the mean over tokens and samples. With m, v, κ the mean, variance and third central
moment of x under a row of attention, r = w_V m − y, and

    ψ_VV = 2⟨m²⟩   ψ_t = 2 w_V⟨r x v⟩   ψ_Vt = 2⟨(w_V m + r) x v⟩   ψ_tt = 2⟨w_V² x² v² + w_V r x² κ⟩
    μ = ψ_t/√d_K   a = ‖w_K + w_Q‖/√(2 d_K)   b = ‖w_K − w_Q‖/√(2 d_K) ,

the spectrum is +μ and −μ, each d_K − 1 times (the bulk), and the three eigenvalues of

    [[ψ_VV, ψ_Vt a, ψ_Vt b], [·, ψ_tt a² + μ, ψ_tt a b], [·, ·, ψ_tt b² − μ]]

(the outliers; `docs/explanation/math.md`, "Scalar attention"). The Gauss–Newton matrix has rank 2 at most. Scaling
(s w_Q, w_K/s) changes neither the loss nor the bulk; P² = a² + b² = (‖w_Q‖² + ‖w_K‖²)/d_K is smallest for equal norms,
and the outliers grow with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvlens.calculus.softmax import softmax
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError


class Bulk(NamedTuple):
    """Eigenvalues ±value, each ``multiplicity`` times."""

    value: float
    multiplicity: int


@dataclass(frozen=True, repr=False)
class ScalarSpectrum:
    """The spectrum of Hessian and Gauss–Newton matrix; vectors are in the order w_Q, w_K, w_V."""

    bulk: Bulk
    outliers: Tensor
    """The three other eigenvalues, ascending."""
    ggn_outliers: Tensor
    """The two eigenvalues that may be non-zero, ascending."""
    outlier_vectors: Tensor
    """(2 d_K + 1, 3)."""
    bulk_vectors: Tensor
    """(2 d_K + 1, 2 d_K − 2): those of +μ, then those of −μ, with μ = `mu`."""
    ggn_vectors: Tensor
    """(2 d_K + 1, 2)."""
    mu: float
    loss: float

    def __repr__(self) -> str:
        outliers = ", ".join(f"{value:.4g}" for value in self.outliers.tolist())
        return (
            f"ScalarSpectrum(bulk ±{self.bulk.value:.4g} × {self.bulk.multiplicity}, outliers {outliers}; "
            f"loss {self.loss:.4g})"
        )

    @property
    def eigenvalues(self) -> Tensor:
        """All 2 d_K + 1 of the Hessian, ascending."""
        bulk = torch.full(
            (self.bulk.multiplicity,), self.bulk.value, dtype=self.outliers.dtype, device=self.outliers.device
        )
        return torch.cat([self.outliers, bulk, -bulk]).sort().values

    @property
    def ggn_eigenvalues(self) -> Tensor:
        """All 2 d_K + 1 of the Gauss–Newton matrix, ascending."""
        zeros = self.ggn_outliers.new_zeros(2 * self.bulk.multiplicity + 1)
        return torch.cat([self.ggn_outliers, zeros]).sort().values

    @property
    def condition(self) -> float:
        """max |λ| / min |λ| over the whole spectrum of the Hessian; infinite if an eigenvalue is zero."""
        sizes = self.eigenvalues.abs()
        return float(sizes.max() / sizes.min())

    def to_dict(self) -> dict[str, object]:
        """Plain numbers."""
        return {
            "bulk": {"value": self.bulk.value, "multiplicity": self.bulk.multiplicity},
            "outliers": self.outliers.tolist(),
            "ggn": self.ggn_outliers.tolist(),
            "condition": self.condition,
            "loss": self.loss,
        }


def spectrum(
    x: Float[Tensor, "*batch l"],
    w_Q: Float[Tensor, " k"],
    w_K: Float[Tensor, " k"],
    w_V: float,
    y: Float[Tensor, "*batch l"],
    *,
    bias: Float[Tensor, "l l"] | None = None,
    mask: str | Bool[Tensor, "l l"] | None = None,
    sink: float = 0.0,
) -> ScalarSpectrum:
    """The spectrum of the Hessian with respect to (w_Q, w_K, w_V).

    Args:
        x: Tokens, scalars; leading axes are samples.
        w_Q: Query weights.
        w_K: Key weights.
        w_V: Value weight.
        y: Targets, with the shape of x.
        bias: Added to the scores; anything that does not depend on the weights. −∞ if a token may not attend.
        mask: None, "causal" or a boolean tensor, True where a token may attend.
        sink: Another bias, towards the first token: an attention sink.
    """
    w_V, sink = _number("w_V", w_V), _number("sink", sink)
    _check(x, w_Q, w_K, y, bias, mask)
    d_k, length = w_Q.shape[0], x.shape[-1]
    x, y = x.reshape(-1, length), y.reshape(-1, length)
    root = d_k**0.5
    scores = (w_Q @ w_K / root) * x[:, :, None] * x[:, None, :]
    if bias is not None:
        scores = scores + bias
    scores[..., 0] += sink
    allowed = scores > -torch.inf
    if mask is not None:
        allowed &= torch.ones_like(allowed).tril() if isinstance(mask, str) else mask
    attention = softmax(scores, allowed)
    # relative to the token with the largest weight, as in `curvlens.calculus.moments`
    r = x.gather(1, attention.argmax(-1))
    apart = x[:, None, :] - r[:, :, None]
    shift = (attention * apart).sum(-1)
    m = torch.where(attention.sum(-1) > 0, r + shift, 0.0)
    centred = apart - shift[:, :, None]
    v, kappa = (attention * centred**2).sum(-1), (attention * centred**3).sum(-1)

    residual = w_V * m - y
    o_vv, o_vt, o_tt = 2 * (m * m).mean(), 2 * w_V * (m * x * v).mean(), 2 * w_V**2 * (x * v).square().mean()
    psi_t = 2 * w_V * (residual * x * v).mean()
    psi_vt = o_vt + 2 * (residual * x * v).mean()
    psi_tt = o_tt + 2 * w_V * (residual * x * x * kappa).mean()
    mu = psi_t / root

    plus, minus = (w_K + w_Q) / (2 * d_k) ** 0.5, (w_K - w_Q) / (2 * d_k) ** 0.5
    a, b = plus.norm(), minus.norm()
    zero = torch.zeros_like(mu)
    small = torch.stack([o_vv, psi_vt * a, psi_vt * b, psi_vt * a, psi_tt * a * a + mu, psi_tt * a * b])
    matrix = torch.cat([small, torch.stack([psi_vt * b, psi_tt * a * b, psi_tt * b * b - mu])]).view(3, 3)
    outliers, inside = torch.linalg.eigh(matrix)
    basis_plus, basis_minus = _basis(plus), _basis(minus)  # first column along the vector, the rest orthogonal to it
    half = 0.5**0.5
    wide = torch.zeros(2 * d_k + 1, 3, dtype=x.dtype, device=x.device)
    wide[-1, 0] = 1
    wide[:d_k, 1], wide[d_k:-1, 1] = half * basis_plus[:, 0], half * basis_plus[:, 0]
    wide[:d_k, 2], wide[d_k:-1, 2] = half * basis_minus[:, 0], -half * basis_minus[:, 0]
    across = torch.zeros(2 * d_k + 1, 2 * d_k - 2, dtype=x.dtype, device=x.device)
    across[:d_k, : d_k - 1] = across[d_k:-1, : d_k - 1] = half * basis_plus[:, 1:]
    across[:d_k, d_k - 1 :] = half * basis_minus[:, 1:]
    across[d_k:-1, d_k - 1 :] = -half * basis_minus[:, 1:]

    p = (a * a + b * b).sqrt()
    ggn, ggn_inside = torch.linalg.eigh(torch.stack([o_vv, o_vt * p, o_vt * p, o_tt * p * p]).view(2, 2))
    along = wide[:, 1] * (a / p if p > 0 else 1 + zero) + wide[:, 2] * (b / p if p > 0 else zero)
    return ScalarSpectrum(
        Bulk(float(mu.abs()), d_k - 1),
        outliers,
        ggn,
        wide @ inside,
        across,
        torch.stack([wide[:, 0], along], 1) @ ggn_inside,
        float(mu),
        float(residual.square().mean()),
    )


def _check(x: Tensor, w_Q: Tensor, w_K: Tensor, y: Tensor, bias: Tensor | None, mask: object) -> None:
    tensors = {"x": x, "w_Q": w_Q, "w_K": w_K, "y": y}
    if isinstance(bias, Tensor):
        tensors["bias"] = bias.masked_fill(bias == -torch.inf, 0)
    alike(tensors)
    for name, weight in (("w_Q", w_Q), ("w_K", w_K)):
        if weight.ndim != 1:
            raise CurvlensError(
                f"{name} has shape {tuple(weight.shape)}, expected a vector (d_K,): tokens are scalars, so the weights "
                f"of queries and keys are vectors. Give {name}.flatten()."
            )
    if w_Q.shape != w_K.shape:
        raise CurvlensError(f"w_Q has {w_Q.numel()} entries, w_K has {w_K.numel()}: they must be equal.")
    if not x.ndim:
        raise CurvlensError("x is a single number, expected (…, tokens): give x[None] for one token.")
    if y.shape != x.shape:
        raise CurvlensError(f"y has shape {tuple(y.shape)}, x has {tuple(x.shape)}: they must be equal.")
    square = (x.shape[-1], x.shape[-1])
    if bias is not None and (not isinstance(bias, Tensor) or tuple(bias.shape) != square):
        given = f"shape {tuple(bias.shape)}" if isinstance(bias, Tensor) else f"type {type(bias).__name__}"
        raise CurvlensError(f"bias has {given}, expected a tensor of shape {square}, queries by keys.")
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or tuple(mask.shape) != square:
            raise CurvlensError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}, expected a boolean tensor of shape {square}, True "
                "where attended. A float mask that is added to the scores goes into bias=."
            )
    elif mask not in (None, "causal"):
        raise CurvlensError(f"mask={mask!r}, expected None, 'causal' or a boolean tensor, True where attended.")


def _number(name: str, given: float | Tensor) -> float:
    """One finite number as a float."""
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise CurvlensError(f"{name}={given!r}, expected one finite number.")
    return number


def _basis(vector: Tensor) -> Tensor:
    """An orthonormal basis whose first column lies along the vector (along the first axis, if it is zero)."""
    n = vector.shape[0]
    first = vector / vector.norm() if vector.norm() > 0 else torch.eye(n, dtype=vector.dtype, device=vector.device)[0]
    # a Householder reflection maps the first axis to the vector
    sign = 1.0 if first[0] <= 0 else -1.0
    u = first.clone()
    u[0] -= sign
    reflected = torch.eye(n, dtype=vector.dtype, device=vector.device)
    if u.norm() > 0:
        u = u / u.norm()
        reflected = reflected - 2 * u[:, None] * u[None, :]
    reflected[:, 0] = first
    return reflected
