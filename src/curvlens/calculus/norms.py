"""LayerNorm and RMSNorm: Jacobian, second derivative contracted with a gradient, its spectrum, and sharp bounds.

A token x ∈ ℝ^d. C = I − 11ᵀ/d for LayerNorm, I for RMSNorm; c = C x, s = √(‖c‖²/d + ε), n = c/s, y = γ∘n + β and
ρ² = ‖n‖²/d = 1 − ε/s² (`docs/explanation/math.md`, "Norms"). Then

    ∂n/∂x = (C − n nᵀ/d)/s,
    K = Σ_b g_b ∂²y_b/∂x² = −(p nᵀ + n pᵀ + θ (C − 3 n nᵀ/d))/(d s²),   p = C(γ∘g),  θ = pᵀ n.

n is computed from x minus its mean, so that a large common offset does not cause cancellation later.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.output_loss import Outputs, output_loss
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.rowwise import RowwiseHessian, Slot, units
from curvlens.calculus.tensor_checks import alike, of_one_kind
from curvlens.calculus.terms import Term, Tokens
from curvlens.errors import CurvlensError

Kind = Literal["layer", "rms"]
Tokens_ = Float[Tensor, "*batch d"]
Vector = Float[Tensor, " d"]

SHARP = 2 / 3**0.5
"""‖K‖₂ ≤ SHARP ‖C(γ∘g)‖/(√d s²); the constant is the smallest possible."""


class Normed(NamedTuple):
    """The result of a norm for tokens (…, d)."""

    n: Tokens_
    """The normalised tokens."""
    s: Float[Tensor, "*batch 1"]
    """The number that each token was divided by."""
    gap: Float[Tensor, "*batch 1"]
    """ε/s² = 1 − ρ², with ρ² = ‖n‖²/d."""


def normed(x: Tokens_, *, eps: float = 1e-5, kind: Kind = "layer") -> Normed:
    """n, s and 1 − ρ² of every token."""
    check(kind, eps)
    require_fit(x)
    c = centred(x, kind)
    variance = c.square().mean(-1, keepdim=True)
    if eps == 0 and not bool((variance > 0).all()):
        raise CurvlensError("A token has no variance and eps is 0: its norm is not defined. Give eps > 0.")
    s = (variance + eps).sqrt()
    return Normed(c / s, s, eps / (variance + eps))


def centred(v: Tokens_, kind: Kind) -> Tokens_:
    """C v: v minus its mean for LayerNorm, v itself for RMSNorm."""
    if kind == "rms":
        return v
    v = v - v[..., :1]  # removes a large common offset without rounding
    return v.sub_(v.mean(-1, keepdim=True))


def projector(d: int, like: Tensor, kind: Kind) -> Float[Tensor, "d d"]:
    """C."""
    eye = torch.eye(d, dtype=like.dtype, device=like.device)
    return eye - 1 / d if kind == "layer" else eye


def forward(
    x: Tokens_, scale: Vector | None = None, shift: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Tokens_:
    """y = γ∘n + β."""
    require_fit(x, scale, shift)
    y = normed(x, eps=eps, kind=kind).n
    y = y if scale is None else y * scale
    return y if shift is None else y + shift


def jacobian(
    x: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch d d"]:
    """∂y/∂x = diag(γ)(C − n nᵀ/d)/s of every token, rows by the entries of y."""
    require_fit(x, scale)
    found = normed(x, eps=eps, kind=kind)
    plain = _plain_jacobian(found, kind)
    return plain if scale is None else scale[:, None] * plain


def _plain_jacobian(found: Normed, kind: Kind) -> Tensor:
    """∂n/∂x, which is symmetric."""
    d = found.n.shape[-1]
    if _lonely(d, kind):
        return (found.gap / found.s)[..., None] * projector(d, found.n, kind)
    outer = found.n[..., :, None] * found.n[..., None, :]
    return (projector(d, found.n, kind) - outer / d) / found.s[..., None]


def _lonely(d: int, kind: Kind) -> bool:
    """Whether C has rank 1. Then C − n nᵀ/d equals (1 − ρ²) C, and the difference would cancel."""
    return d == (2 if kind == "layer" else 1)


def contracted(
    x: Tokens_, grad: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch d d"]:
    """K = Σ_b g_b ∂²y_b/∂x² of every token."""
    require_fit(x, scale, grad=grad)
    found = normed(x, eps=eps, kind=kind)
    p, theta = _pulled(found, grad, scale, kind)
    n, d = found.n, found.n.shape[-1]
    if _lonely(d, kind):
        return (-3 * theta * found.gap / (d * found.s.square()))[..., None] * projector(d, n, kind)
    cross = p[..., :, None] * n[..., None, :]
    own = projector(d, n, kind) - (3 / d) * n[..., :, None] * n[..., None, :]
    return -(cross + cross.mT + theta[..., None] * own) / (d * found.s[..., None].square())


def _pulled(found: Normed, grad: Tensor, scale: Tensor | None, kind: Kind) -> tuple[Tensor, Tensor]:
    """p = C(γ∘g) and θ = pᵀ n."""
    p = centred(grad if scale is None else grad * scale, kind)
    return p, (p * found.n).sum(-1, keepdim=True)


def second_derivative(
    x: Tokens_, u: Tokens_, v: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Tokens_:
    """D²y[u, v] of every token, symmetric in the two directions."""
    require_fit(x, scale, u=u, v=v)
    found = normed(x, eps=eps, kind=kind)
    n, d = found.n, found.n.shape[-1]
    cu, cv = centred(u, kind), centred(v, kind)
    along_u, along_v = ((n * w).sum(-1, keepdim=True) / d for w in (cu, cv))
    both = (cu * cv).sum(-1, keepdim=True) / d - 3 * along_u * along_v
    bent = -(along_v * cu + along_u * cv + n * both) / found.s.square()
    return bent if scale is None else bent * scale


def trace(
    x: Tokens_, grad: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch"]:
    """tr K = −θ (d + 1 − 3ρ²)/(d s²), for RMSNorm −θ (d + 2 − 3ρ²)/(d s²)."""
    require_fit(x, scale, grad=grad)
    found = normed(x, eps=eps, kind=kind)
    _, theta = _pulled(found, grad, scale, kind)
    d = found.n.shape[-1]
    count = d + (1 if kind == "layer" else 2)
    return (-theta * (count - 3 + 3 * found.gap) / (d * found.s.square())).squeeze(-1)


def spectrum(
    x: Tokens_, grad: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch d"]:
    """All eigenvalues of K in ascending order, in closed form.

    −θ/(d s²) with multiplicity d − 3 (RMSNorm d − 2), 0 on the constant vector (LayerNorm), and the two eigenvalues of
    −[[3θ(1 − ρ²), √d ρ ‖q‖], [·, θ]]/(d s²) with ‖q‖² = ‖p‖² − θ²/(d ρ²).
    """
    require_fit(x, scale, grad=grad)
    found = normed(x, eps=eps, kind=kind)
    p, theta = _pulled(found, grad, scale, kind)
    theta, s2, d = theta.squeeze(-1), found.s.squeeze(-1).square(), found.n.shape[-1]
    size = found.n.norm(dim=-1)
    unit = found.n / found.n.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
    unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp(min=1.0)  # 0 for a token without variance
    along = (p * unit).sum(-1, keepdim=True)
    q = torch.linalg.vector_norm(centred(p, kind) - along * unit, dim=-1)  # the part of p orthogonal to n
    free = d - (1 if kind == "layer" else 0)  # the rank of C
    constant = [torch.zeros_like(theta)] if kind == "layer" else []
    corner = 3 * theta * found.gap.squeeze(-1)
    if free == 0:
        values = constant
    elif free == 1:
        values = [*constant, -corner / (d * s2)]
    else:
        cross = size * q
        middle, half = (corner + theta) / 2, torch.hypot((corner - theta) / 2, cross)
        values = [*constant, -(middle + half) / (d * s2), -(middle - half) / (d * s2)]
        values += [-theta / (d * s2)] * (free - 2)
    return torch.stack(values, -1).sort(-1).values


def jacobian_bound(
    x: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch"]:
    """‖∂y/∂x‖₂ ≤ max|γ|/s."""
    require_fit(x, scale)
    largest = 1.0 if scale is None else scale.abs().max()
    return (largest / normed(x, eps=eps, kind=kind).s).squeeze(-1)


def second_bound(
    x: Tokens_, grad: Tokens_, scale: Vector | None = None, *, eps: float = 1e-5, kind: Kind = "layer"
) -> Float[Tensor, "*batch"]:
    """‖K‖₂ ≤ (2/√3) ‖C(γ∘g)‖/(√d s²); the constant is sharp."""
    require_fit(x, scale, grad=grad)
    found = normed(x, eps=eps, kind=kind)
    p, _ = _pulled(found, grad, scale, kind)
    size = torch.linalg.vector_norm(p, dim=-1)
    bound: Tensor = SHARP * size / (found.n.shape[-1] ** 0.5 * found.s.squeeze(-1).square())
    return bound


@in_own_dtype
def hessian(
    X: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    target: Tensor | None = None,
    *,
    grad: Tensor | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    eps: float = 1e-5,
    kind: Kind = "layer",
    wrt: str | None = None,
    reduction: str = "mean",
) -> RowwiseHessian:
    """The Hessian of a loss of a norm's output, with respect to its scale γ, its shift β and the tokens.

    Args:
        X: Tokens (…, L, d). Leading axes are samples.
        scale: γ, (d,); None for ones, which are no variable.
        shift: β, (d,); None for zeros, which are no variable.
        target: Y (…, L, d), for the square loss ‖y − Y‖²/(L d).
        grad: For any other loss, ∂ℓ/∂y of each sample, (…, L, d).
        curvature: For that loss, the second derivative at every token, as in `curvlens.calculus.attention.hessian`.
        eps: ε.
        kind: "layer" or "rms".
        wrt: The variables as words: ``scale``, ``shift``, ``X``; names that were not given are left out. None means
            scale and shift, or X if neither is given.
        reduction: "mean" over the samples, or "sum".

    >>> H = hessian(torch.eye(2, 3), torch.ones(3), torch.zeros(3), torch.zeros(2, 3), wrt="scale shift X")
    >>> H.total.names, H.norm(("scale", "shift"), "functional")
    (('scale', 'shift', 'X'), 0.0)
    """
    given = {"X": X, "scale": scale, "shift": shift}
    alike({name: t for name, t in given.items() if t is not None})
    if X.ndim < 2:
        raise CurvlensError(f"X has shape {tuple(X.shape)}, expected (…, tokens, features).")
    d = X.shape[-1]
    for name, vector in (("scale", scale), ("shift", shift)):
        if vector is not None and tuple(vector.shape) != (d,):
            raise CurvlensError(f"X of shape {tuple(X.shape)} and {name} of shape {tuple(vector.shape)} do not fit.")
    known = [name for name in ("scale", "shift", "X") if given[name] is not None]
    words = (["scale", "shift"] if len(known) > 1 else ["X"]) if wrt is None else wrt.split()
    if not words or any(word not in ("scale", "shift", "X") for word in words):
        raise CurvlensError(f"wrt={wrt!r}, expected words among scale, shift and X, as in 'scale X'.")
    wanted = [name for name in known if name in words]
    if not wanted:
        raise CurvlensError(f"wrt={wrt!r}, but none of these was given.")
    x = X.detach().clone().reshape(-1, X.shape[-2], d)  # later writes must not matter
    gamma = None if scale is None else scale.detach().clone()
    beta = None if shift is None else shift.detach().clone()
    outputs = Outputs(lambda: forward(x, gamma, beta, eps=eps, kind=kind), tuple(x.shape), X.shape[:-2], x)  # type: ignore[arg-type]
    loss = output_loss(outputs, target, grad, curvature, reduction)
    rows, g = x.flatten(0, 1), loss.gradient.flatten(0, 1)
    found = normed(rows, eps=eps, kind=kind)
    plain, one = _plain_jacobian(found, kind), x.new_ones(len(rows), 1)
    slots = {
        "scale": Slot((1, d), one, found.n.diag_embed()),
        "shift": Slot((1, d), one, None),
        "X": Slot((len(rows), d), units(rows), plain if gamma is None else plain * gamma),
    }

    def functional(first: str, second: str) -> list[Term]:
        if (first, second) == ("X", "X"):
            bent = contracted(rows, g, gamma, eps=eps, kind=kind)
            return [Tokens(slots["X"].u, slots["X"].u, bent, "a", "c", "de", True)]
        if (first, second) == ("scale", "X"):
            return [Tokens(one, slots["X"].u, g[..., None] * plain, "a", "c", "de")]
        return []

    return RowwiseHessian({name: slots[name] for name in wanted}, functional, loss, f"of a {kind} norm")


def require_fit(x: Any, scale: Any = None, shift: Any = None, **directions: Any) -> None:
    """Check that tokens are (…, d), vectors (d,), and directions have the shape of the tokens."""
    given = {"x": x, "scale": scale, "shift": shift, **directions}
    given = {name: tensor for name, tensor in given.items() if tensor is not None or name not in ("scale", "shift")}
    of_one_kind(given)
    for name, tensor in given.items():
        if not x.ndim or not x.shape[-1]:
            raise CurvlensError(f"x has shape {tuple(x.shape)}, expected (…, features).")
        if name in ("scale", "shift") and tuple(tensor.shape) != (x.shape[-1],):
            raise CurvlensError(
                f"{name} has shape {tuple(tensor.shape)}, expected ({x.shape[-1]},), one number a feature of x, which "
                f"has shape {tuple(x.shape)}."
            )
        if name in directions and tensor.shape != x.shape:
            raise CurvlensError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(x.shape)}, that of x: a row for each token."
            )


def check(kind: str, eps: float) -> None:
    """Check the kind and the ε of a norm."""
    if kind not in ("layer", "rms"):
        raise CurvlensError(f"kind={kind!r}, expected 'layer' or 'rms'.")
    if not eps >= 0:
        raise CurvlensError(f"eps={eps}, expected 0 or more: it is added to a variance.")
