"""The public functions: the output of an attention layer, and the Hessian of a loss of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.attention.hessian import AttentionHessian
from curvlens.calculus.attention.inputs import Kind, Value, attention_inputs
from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.output_loss import output_loss
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.errors import CurvlensError


@in_own_dtype
def forward(
    X: Tensor,
    WQ: Tensor,
    WK: Tensor,
    WV: Value,
    *,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    context: Tensor | None = None,
) -> Float[Tensor, "*batch l v"]:
    """The output F of the layer, (…, L, d_V). Arguments as for `hessian`."""
    of = attention_inputs(X, WQ, WK, WV, mask=mask, temperature=temperature, kind=kind, context=context)
    return of.output.reshape(*X.shape[:-2], *of.output.shape[1:])


@in_own_dtype
def hessian(
    X: Tensor,
    WQ: Tensor,
    WK: Tensor | None,
    WV: Value,
    target: Tensor | None = None,
    *,
    grad: Tensor | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    kind: Kind = "softmax",
    context: Tensor | None = None,
    wrt: str | Sequence[str] = "QKV",
    reduction: str = "mean",
) -> AttentionHessian:
    """The Hessian of a loss of an attention layer's output, exact and without differentiation.

    F = A X W_V with A = softmax(X W_Q W_Kᵀ Xᵀ / (t √d_K)), row by row.

    Args:
        X: Tokens (…, L, d). Leading axes are samples; the loss is their mean.
        WQ: (d, d_K), or (H, d, d_K) for H heads, whose outputs add up. All weights have inputs first. `nn.Linear`
            stores outputs first: give ``weight.T``. There are no biases.
        WK: Like WQ. None means one matrix W_QK instead of W_Q W_Kᵀ: see `hessian_single`.
        WV: (d, d_V), or a pair (down (d, r), up (r, d_V)) for a value of low rank; with a leading head axis as WQ.
        target: Y (…, L, d_V), for the square loss ‖F − Y‖²/(L d_V).
        grad: For any other loss, ∂ℓ/∂F of each sample, (…, L, d_V).
        curvature: For that loss, ∂²ℓ/∂f_i² of each token, (…, L, d_V, d_V), or c for c·I, or `Root` (R) for R Rᵀ; or a
            pair (gauss_newton, rest) if something non-linear follows the layer: the first goes into the outer part, the
            rest into the functional part.
        mask: None, "causal", or a boolean tensor (L, L_k) or (…, L, L_k), True where a query may attend to a key;
            axes of length 1 are repeated, so padding is ``real[:, None, :]``. A query that may attend to nothing has
            output 0.
        temperature: t.
        kind: "softmax", or "linear" for A = X W_Q W_Kᵀ Xᵀ / (t √d_K), zero where masked.
        context: Tokens (…, L_k, d) that give keys and values, for cross-attention.
        wrt: The variables as letters: Q, K, V (includes W_O, if low-rank), X, and C for the context. Blocks come in
            this order, head by head, whatever the order of the letters.
        reduction: "mean" over the samples, or "sum".

    >>> X, W = torch.eye(3, 2), torch.eye(2)
    >>> H = hessian(X, W, W, W, target=torch.zeros(3, 2), mask="causal")
    >>> H.total.names, H.outer["V"].shape, H.norm("V", "functional")
    (('Q', 'K', 'V'), torch.Size([4, 4]), 0.0)
    """
    with torch.inference_mode():  # saves a tenth of the time for small layers
        of = attention_inputs(X, WQ, WK, WV, mask=mask, temperature=temperature, kind=kind, context=context)
        batch = X.shape[:-2]
        loss = output_loss(of.outputs(batch), target, grad, curvature, reduction)
    letters = _letters(wrt, context is not None)
    if "O" in letters and of.up is None:
        raise CurvlensError(f"wrt={wrt!r}: there is no O, as the value is one matrix. Give WV=(down, up).")
    if "O" in letters and "V" not in letters:
        raise CurvlensError(f"wrt={wrt!r}: O needs V: V means both factors of the value.")
    found = AttentionHessian(of, loss, letters, batch, named=WQ.ndim == 3)
    if not found.total.size:
        raise CurvlensError(f"wrt={wrt!r} names no block: with one matrix W_QK the letters are Q and V.")
    return found


def hessian_single(X: Tensor, WQK: Tensor, WV: Value, target: Tensor | None = None, **options: Any) -> AttentionHessian:
    """The same with one matrix instead of W_Q W_Kᵀ: T = X W_QK Xᵀ / t (Lemma 4.1). The blocks are "QK" and "V".

    ``options`` are those of `hessian`.
    """
    return hessian(X, WQK, None, WV, target, **options)


def _letters(wrt: str | Sequence[str], crossed: bool) -> list[str]:
    known = "QKVXC" if crossed else "QKVX"
    letters = list(dict.fromkeys(wrt)) if isinstance(wrt, (str, list, tuple)) else []
    if not letters or any(letter not in tuple(known + "O") for letter in letters):
        raise CurvlensError(
            f"wrt={wrt!r}, expected letters among {', '.join(known)} (C only with a context; V means both factors "
            "of a value of low rank, W_V and W_O)."
        )
    return letters
