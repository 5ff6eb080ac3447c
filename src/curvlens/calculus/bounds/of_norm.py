"""Bounds for a loss of the output of LayerNorm or RMSNorm.

With γ the largest |scale|, s the smallest of the s_i, g the longest row of the gradient and c its longest column,

    Jacobians    X: γ/s      scale: max_j ‖n_:j‖ ≤ √(L (d − 1)), for RMSNorm √(L d)      shift: √L
    functional   (X, X): (2/√3) γ g/(√d s²)      (scale, X): c/s      all others 0 .
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from curvlens.calculus import norms
from curvlens.calculus.bounds.bound import Bound, in_range, selected
from curvlens.calculus.bounds.sizes import Local, Pairs, Sizes, matrix, one_sample, seen, sizes, spectral
from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.norms import SHARP, Kind
from curvlens.calculus.output_loss import Outputs
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError


@in_range
def norm(
    X: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    target: Tensor | None = None,
    *,
    grad: Tensor | float | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    eps: float = 1e-5,
    kind: Kind = "layer",
    wrt: str | None = None,
    data: bool = False,
) -> Bound:
    """A bound for one sample and a loss of a norm's output, by its scale γ, its shift β and the tokens.

    Args:
        X: Tokens (L, d).
        scale: γ, (d,); None for ones, which are no variable.
        shift: β, (d,); None for zeros, which are no variable.
        target: Y (L, d), for the square loss ‖y − Y‖²/(L d).
        grad: For any other loss, ∂ℓ/∂y, (L, d); without ``data`` a bound on its norm is enough.
        curvature: For that loss, the second derivative at every token, as in `curvlens.calculus.norms.hessian`; a
            number c is also a bound on it.
        eps: ε.
        kind: "layer" or "rms".
        wrt: The variables as words: ``scale``, ``shift``, ``X``; names that were not given are left out. None means
            scale and shift, or X if neither is given.
        data: Use s, n and the gradient of every token. Otherwise the largest and smallest over all tokens.

    >>> X, one = torch.eye(2, 3), torch.ones(3)
    >>> bound = norm(X, one, grad=torch.ones(2, 3), curvature=0.0, wrt="scale X")
    >>> bound.names, bound.block("scale", "scale"), bound.block("X", "X") > 0
    (('scale', 'X'), 0.0, True)
    """
    given = {"X": X, "scale": scale, "shift": shift}
    alike({name: t for name, t in given.items() if t is not None})
    one_sample(X)
    norms.check(kind, eps)
    vectors(X.shape[1], {"scale": scale, "shift": shift})
    x, gamma, beta = (None if t is None else t.detach().double() for t in (X, scale, shift))
    assert x is not None
    shape = (1, *X.shape)
    outputs = Outputs(lambda: norms.forward(x, gamma, beta, eps=eps, kind=kind)[None].to(X.dtype), shape, (), X)
    loss = seen(outputs, target, grad, curvature, data=data)
    local: Local[Tensor] | Local[Sizes]
    if data:
        local = known(x, gamma, beta, eps, kind)
        functional = local.bend(cast(Tensor, loss.gradient))
    else:
        local = prior(sizes(x, spread(x, kind)), len(x), X.shape[1], gamma, beta, eps, kind)
        functional = local.bend(cast(Sizes, loss.gradient))
    names = [name for name in ("scale", "shift", "X") if given[name] is not None]
    wrt = "X" if wrt is None and names == ["X"] else wrt
    words = None if wrt is None else " ".join(word for word in wrt.split() if given.get(word, X) is not None)
    j = torch.tensor([local.first[name] for name in names], dtype=torch.float64)
    square = j[:, None] * j
    return selected(names, words, loss.outer * square, loss.rest * square + matrix(names, functional))


def vectors(d: int, given: dict[str, Tensor | None]) -> None:
    """Check that scales and shifts have d entries."""
    for name, vector in given.items():
        if vector is not None and tuple(vector.shape) != (d,):
            raise CurvlensError(f"{name} has shape {tuple(vector.shape)}, expected {(d,)}, one number a feature.")


def spread(x: Tensor, kind: Kind) -> float:
    """min ‖C x_i‖."""
    return float(norms.centred(x, kind).norm(dim=-1).min())


def prior(
    x: Sizes, length: int, d: int, scale: Tensor | None, shift: Tensor | None, eps: float, kind: Kind
) -> Local[Sizes]:
    """The bounds from sizes alone."""
    s = math.hypot(x.spread / math.sqrt(d), math.sqrt(eps))
    if s == 0:
        raise CurvlensError("eps is 0, so without data the bound is infinite. Give eps > 0, or data=True.")
    gamma = 1.0 if scale is None else float(scale.abs().max())
    reach = math.sqrt(d - 1 if kind == "layer" else d)  # the largest |n_ij|
    root, slope = math.sqrt(length), gamma / s * (reach > 0)  # a single feature minus its mean is 0
    row = gamma * math.sqrt(d) + (0.0 if shift is None else float(shift.norm()))
    first = {"X": slope, "scale": root * reach, "shift": root}

    def bend(grad: Sizes) -> Pairs:
        bent = SHARP * slope * grad.row / (math.sqrt(d) * s)
        return {("X", "X"): bent, ("scale", "X"): grad.column / s * (reach > 0)}

    return Local(Sizes.at_most(root * row, row), first, bend, lambda g: Sizes.at_most(slope * g.total, slope * g.row))


def known(x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, kind: Kind) -> Local[Tensor]:
    """The bounds from the tokens: the exact norms of these blocks."""
    found = norms.normed(x, eps=eps, kind=kind)
    if not found.s.isfinite().all():
        raise OverflowError("norm of tokens")
    plain = norms.jacobian(x, eps=eps, kind=kind)
    jacobian = plain if scale is None else scale[:, None] * plain
    first = {"X": spectral(jacobian), "scale": float(found.n.norm(dim=0).max()), "shift": math.sqrt(len(x))}

    def bend(grad: Tensor) -> Pairs:
        bent = float(norms.spectrum(x, grad, scale, eps=eps, kind=kind).abs().max())
        return {("X", "X"): bent, ("scale", "X"): spectral((plain * grad[:, None, :]).flatten(0, 1))}

    output = norms.forward(x, scale, shift, eps=eps, kind=kind)
    return Local(output, first, bend, lambda g: (g[:, None, :] @ jacobian).squeeze(1), jacobian.mT)
