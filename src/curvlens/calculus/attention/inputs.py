"""An attention layer as plain tensors: the user's arguments, checked and brought to a common format.

Tokens are rows. F = Σ_h A_h X_k W_V^h with A_h = softmax(τ X_q W_Q^h W_K^hᵀ X_kᵀ + mask), row by row, and τ = 1/(t
√d_K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.moments import from_origin
from curvlens.calculus.output_loss import Outputs
from curvlens.calculus.own_dtype import calculated
from curvlens.calculus.room import require_room
from curvlens.calculus.softmax import softmax
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError, a_kind

Kind = Literal["softmax", "linear"]
Value = Tensor | tuple[Tensor, Tensor]


@dataclass(eq=False)
class AttentionInputs:
    """Tokens (B, L, d), weights with a leading head axis, the scale of the scores, and which query sees which key."""

    queries: Tensor
    keys: Tensor
    WQ: Tensor
    WK: Tensor | None
    """None for one matrix W_QK instead of W_Q W_Kᵀ."""
    down: Tensor
    up: Tensor | None
    """W_V = down up, or W_V = down."""
    tau: float
    allowed: Tensor | None
    kind: Kind
    crossed: bool
    """Whether keys and values come from a separate context."""

    @property
    def heads(self) -> int:
        """H."""
        return self.WQ.shape[0]

    @property
    def samples(self) -> int:
        """B."""
        return self.queries.shape[0]

    @property
    def d_out(self) -> int:
        """The number of columns of F."""
        return (self.down if self.up is None else self.up).shape[-1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of F: (B, L, d_out)."""
        return (*self.queries.shape[:2], self.d_out)

    @calculated
    def WV(self) -> Float[Tensor, "h d o"]:
        """The value matrix of each head, (H, d, d_out)."""
        return self.down if self.up is None else self.down @ self.up

    @calculated
    def q(self) -> Float[Tensor, "h n k"]:
        """X_q W_Q, (H, B·L, d_K)."""
        return self.times(self.queries.flatten(0, 1), self.WQ)

    @calculated
    def kappa(self) -> Float[Tensor, "h n d"]:
        """κ_i = τ W_K W_Qᵀ x_i, so that T_ij = κ_i · x_j: (H, B·L, d)."""
        return self.tau * (self.q if self.WK is None else torch.bmm(self.q, self.WK.mT))

    @calculated
    def attention(self) -> Float[Tensor, "h b l m"]:
        """A, (H, B, L, L_k)."""
        (samples, rows), keys = self.queries.shape[:2], self.keys.shape[1]
        require_room(
            3 * self.heads * samples * rows * keys, self.queries, "Attention", "Give fewer tokens or samples at a time."
        )
        scores = self.kappa.view(-1, samples, rows, self.keys.shape[-1])
        scores = torch.bmm(scores[0], self.keys.mT)[None] if self.heads == 1 else scores @ self.keys.mT
        if not math.isfinite(float(scores.sum())) and not scores.isfinite().all():
            raise CurvlensError("Scores overflow: tokens and weights are too large for their dtype.")
        if self.kind == "softmax":
            return softmax(scores, self.allowed)
        return scores if self.allowed is None else scores * self.allowed

    @calculated
    def centred(self) -> Float[Tensor, "b m d"]:
        """The keys minus a common origin, (B, L_k, d). A softmax does not depend on a common offset of the keys."""
        if self.kind != "softmax":
            return self.keys
        return from_origin(self.attention.transpose(0, 1).flatten(1, 2), self.keys)[1]

    @calculated
    def mean(self) -> Float[Tensor, "h n d"]:
        """m_i = Σ_j A_ij x_j, (H, B·L, d)."""
        if self.heads == 1:
            return torch.bmm(self.attention[0], self.keys).view(1, -1, self.keys.shape[2])
        return (self.attention @ self.keys).flatten(1, 2)

    @calculated
    def output(self) -> Float[Tensor, "b l o"]:
        """F, (B, L, d_out), from the values X W_V and not from m: parts that W_V removes are gone before the sum."""
        values = self.times(self.keys.flatten(0, 1), self.WV).view(-1, self.keys.shape[1], self.d_out)
        found = torch.bmm(self.attention.flatten(0, 1), values).view(self.heads, *self.shape)
        return found[0] if self.heads == 1 else found.sum(0)

    def times(self, rows: Float[Tensor, "n p"], weights: Float[Tensor, "h p q"]) -> Float[Tensor, "h n q"]:
        """Rows (N, ·) times the matrices of all heads: (H, N, ·)."""
        return torch.bmm(rows.expand(self.heads, -1, -1), weights)

    def outputs(self, batch: Sequence[int]) -> Outputs:
        """The output in the format that a loss needs."""
        return Outputs(lambda: self.output, self.shape, batch, self.queries, self.heads)

    def copy(self) -> AttentionInputs:
        """A copy with tensors of its own. Outside of inference mode, one may differentiate through them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        own: dict[str, Any] = {name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items()}
        return AttentionInputs(**own)

    def rows(self, keep: Tensor) -> AttentionInputs:
        """The same layer with only some of the query positions."""
        allowed = None if self.allowed is None else self.allowed[..., keep, :]
        return replace(
            self, queries=self.queries[:, keep], keys=_seen(self.keys, allowed), allowed=allowed, crossed=True
        )

    def only(self, known: Tensor) -> AttentionInputs:
        """The same layer, in which queries outside of ``known`` (B, L) are zero and see nothing."""
        sees = known[..., None]
        everywhere = sees.expand(-1, -1, self.keys.shape[1])
        allowed = everywhere if self.allowed is None else self.allowed & everywhere
        return replace(self, queries=self.queries.where(sees, 0.0), keys=_seen(self.keys, allowed), allowed=allowed)


def attention_inputs(
    x: Tensor,
    wq: Tensor,
    wk: Tensor | None,
    wv: Value,
    *,
    mask: Any,
    temperature: float,
    kind: str,
    context: Tensor | None,
) -> AttentionInputs:
    """Check the user's arguments and bring them to a common format."""
    for name, tensor in (("X", x), ("WQ", wq), ("WV", wv)):
        if tensor is None:
            raise CurvlensError(f"{name} is None, expected a tensor.")
    if isinstance(wv, (tuple, list)) and len(wv) != 2:
        raise CurvlensError(f"WV is one matrix, or a pair (down, up); {len(wv)} given.")
    down, up = wv if isinstance(wv, (tuple, list)) else (wv, None)
    q_name, v_name = "WQK" if wk is None else "WQ", "WV" if up is None else "WV (down)"
    named = {"X": x, q_name: wq, "WK": wk, v_name: down, "WO (up)": up, "context": context}
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    alike(tensors)
    # No derivatives are needed here, so no graph is built.
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}  # later writes must not matter
    x, context = tensors["X"], tensors.get("context")
    for name in ("X", "context"):
        if name in tensors and tensors[name].ndim < 2:
            raise CurvlensError(f"{name} has shape {tuple(tensors[name].shape)}, expected (…, tokens, features).")
    weights = {name: t for name, t in tensors.items() if name not in ("X", "context")}
    dims = {t.ndim for t in weights.values()}
    if dims not in ({2}, {3}):
        raise CurvlensError(
            "The weights are matrices, or all of them have one leading head axis; got "
            + ", ".join(f"{name} {tuple(t.shape)}" for name, t in weights.items())
            + "."
        )
    if kind not in ("softmax", "linear"):
        raise CurvlensError(f"kind={kind!r}, expected 'softmax' or 'linear'.")
    tau = _tau(temperature, 1.0 if wk is None else wq.shape[-1] ** 0.5)
    if tau is None:
        raise CurvlensError(f"temperature={temperature}, expected a positive number: it divides the scores.")
    keys = x if context is None else context
    if keys.shape[:-2] != x.shape[:-2]:
        raise CurvlensError(
            f"X has the batch shape {tuple(x.shape[:-2])}, context {tuple(keys.shape[:-2])}: they must be equal."
        )
    heads = {name: w if w.ndim == 3 else w[None] for name, w in weights.items()}
    query, key, value, out = heads[q_name], heads.get("WK"), heads[v_name], heads.get("WO (up)")
    for name, w in heads.items():
        if w.shape[0] != query.shape[0]:
            raise CurvlensError(f"{q_name} has {query.shape[0]} heads, {name} has {w.shape[0]}.")
    k_name = "X" if context is None else "context"
    fits = [("X", x, -1, q_name, query, 1)]
    if key is None:
        fits += [(k_name, keys, -1, q_name, query, 2)]
    else:
        fits += [(k_name, keys, -1, "WK", key, 1), (q_name, query, 2, "WK", key, 2)]
    fits += [(k_name, keys, -1, v_name, value, 1)]
    if out is not None:
        fits += [(v_name, value, 2, "WO (up)", out, 1)]
    for first, a, i, second, b, j in fits:
        if a.shape[i] != b.shape[j]:
            turned = first in ("X", "context") and a.shape[i] == b.shape[2]
            hint = f" Weights have inputs first; is {second} stored as nn.Linear does? Give weight.T." if turned else ""
            raise CurvlensError(
                f"{first} of shape {tuple(tensors[first].shape)} and {second} of shape "
                f"{tuple(tensors[second].shape)} do not fit: {a.shape[i]} against {b.shape[j]}.{hint}"
            )
    allowed = _allowed(mask, x, keys)
    queries = x.reshape(-1, *x.shape[-2:])
    return AttentionInputs(
        queries,
        _seen(queries if context is None else keys.reshape(-1, *keys.shape[-2:]), allowed),
        query,
        key,
        value,
        out,
        tau,
        allowed,
        kind,  # type: ignore[arg-type]
        context is not None,
    )


def _seen(keys: Tensor, allowed: Tensor | None) -> Tensor:
    """The keys, set to zero if no query may attend to them: such keys may have any size."""
    if allowed is None or bool((seen := allowed.any(-2)).all()):
        return keys
    return keys.where(seen[..., None], 0.0)


def _tau(temperature: Any, root: float) -> float | None:
    """1/(t √d_K); None if t is not a positive number, or if the square overflows."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature > 0:
        return None
    tau = 1 / (temperature * root) if temperature * root > 0 else math.inf
    return tau if tau > 0 and abs(math.log10(tau) if tau < math.inf else math.inf) < 150 else None


def _as_boolean(mask: Any) -> str:
    """Advice on how to make a boolean mask of a numeric one."""
    if not isinstance(mask, Tensor) or mask.is_complex() or mask.is_meta:
        return " For ones and zeros, use torch.as_tensor(mask, dtype=torch.bool)." if hasattr(mask, "shape") else ""
    if bool((mask <= 0).all()):  # also for all zeros, which mask nothing
        return " For numbers that are added to the scores, use mask == 0."
    if bool(((mask == 0) | (mask == 1)).all()):
        return " For ones where attended, use mask.bool()."
    return " It has neither ones where attended nor a large negative number where not: numbers are not supported."


def _allowed(mask: Any, x: Tensor, keys: Tensor) -> Tensor | None:
    """(B or 1, L, L_k), True where a query may attend to a key."""
    if mask is None:
        return None
    size = (x.shape[-2], keys.shape[-2])
    if isinstance(mask, str):
        if mask != "causal":
            raise CurvlensError(f"mask={mask!r}, expected None, 'causal' or a boolean tensor, True where attended.")
        if size[0] != size[1]:
            raise CurvlensError(f"mask='causal' with {size[0]} queries and {size[1]} keys: give a boolean tensor.")
        return torch.ones(1, *size, dtype=torch.bool, device=x.device).tril()
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = f"of {mask.dtype}" if isinstance(mask, Tensor) else a_kind(mask)
        raise CurvlensError(
            f"mask is {given}; expected None, 'causal' or a boolean tensor, True where attended.{_as_boolean(mask)}"
        )
    full = (*x.shape[:-2], *size)
    try:
        wide = mask.expand(full) if mask.ndim > 2 else mask.expand(1, *size)
    except RuntimeError as error:
        wanted = f"{size}" if full == size else f"{size} or {full}"
        hint = " A mask of the keys alone is real[:, None, :]." if mask.ndim == 2 and len(full) == 3 else ""
        raise CurvlensError(f"mask has shape {tuple(mask.shape)}, expected {wanted}.{hint}") from error
    return wide.reshape(-1, *size).to(x.device, copy=True)
