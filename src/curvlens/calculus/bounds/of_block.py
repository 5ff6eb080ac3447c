"""A bound for a whole Transformer block: attention, feed-forward layer, skips and norms.

Let t be bounds on ‖∂y/∂·‖, C_m bounds of layer m on the blocks of λ_m · D²f_m, and T_m bounds on its tangents. Then
‖H‖₂ is at most the norm of ‖∇²ℓ‖ t tᵀ + Σ_m T_mᵀ C_m T_m (`docs/explanation/math.md`, "Bounds").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus import norms
from curvlens.calculus.attention.inputs import AttentionInputs, attention_inputs
from curvlens.calculus.bounds import heads, of_feedforward, of_norm
from curvlens.calculus.bounds.bound import Bound, in_range, selected
from curvlens.calculus.bounds.sizes import Local, S, Sizes, one_sample, seen, sizes
from curvlens.calculus.bounds.tape import Tape
from curvlens.calculus.curvature import OutputCurvature
from curvlens.calculus.feedforward import fit, forward
from curvlens.calculus.norms import Kind
from curvlens.calculus.output_loss import Outputs
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError

Placement = Literal["pre", "post", "none"]
INNER = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias")
NORMS = ("norm1.scale", "norm1.shift", "norm2.scale", "norm2.shift")
HEADED = ("Q", "K", "V", "O")
NAMES = (*NORMS[:2], *HEADED, *NORMS[2:], *INNER)
"""All weights that a block may have, in order."""


@in_range
def block(
    X: Tensor,
    weights: Mapping[str, Tensor],
    target: Tensor | None = None,
    *,
    heads: int | None = None,
    norm: Placement = "pre",
    norm_kind: Kind = "layer",
    eps: float = 1e-5,
    activation: str = "gelu",
    mask: str | Tensor | None = None,
    temperature: float = 1.0,
    grad: Tensor | float | None = None,
    curvature: OutputCurvature | tuple[OutputCurvature, OutputCurvature] | None = None,
    wrt: str | None = None,
    data: bool = False,
) -> Bound:
    """A bound for one sample and a loss of a Transformer block's output: for every weight and for all together.

    The weights and options of `curvlens.assembly.block` are accepted, q, k, v and o together with ``heads``. Here
    attention has no biases, and a feed-forward layer is required.

    Args:
        X: Tokens (L, d).
        weights: By name, inputs first. With ``heads``, as in `curvlens.assembly.block`. Otherwise Q, K and V are
            (d, d_K), (d, d_K) and (d, d_V), and O, which is optional, (d_V, d); all may have a leading head axis; up is
            (d, m) and down (m, d). Optional are gate (d, m), up_bias, gate_bias, down_bias, norm1.scale, norm1.shift,
            norm2.scale and norm2.shift. A missing weight is no variable: a norm without a scale has ones.
        target: Y (L, d), for the square loss ‖y − Y‖²/(L d).
        heads: The number of heads in the matrices q, k, v, o: (d, heads·d_K), …, (d, heads·d_V) and (heads·d_V, d).
        norm: "pre" for y = u + mlp(norm2(u)), u = X + attn(norm1(X)); "post" for y = norm2(u + mlp(u)), u = norm1(X +
            attn(X)); "none" for skips alone.
        norm_kind: "layer" or "rms".
        eps: ε of both norms.
        activation: As in `curvlens.calculus.feedforward.hessian`, or "swiglu": silu with a gate.
        mask: As in `curvlens.calculus.attention.hessian`.
        temperature: As there.
        grad: For any other loss, ∂ℓ/∂y, (L, d); without ``data`` a bound on its norm is enough.
        curvature: For that loss, the second derivative at every token; a number c is also a bound on it.
        wrt: The variables as words: names of weights and X; None for all weights.
        data: Use the states, gradients and attention moments at every layer. Otherwise only norms of tokens and
            weights, and ε (and the residual, if a target is given).

    >>> X, W = torch.eye(3, 2), torch.eye(2)
    >>> weights = {"Q": W, "K": W, "V": W, "up": W, "down": W}
    >>> prior, data = (block(X, weights, torch.zeros(3, 2), data=known) for known in (False, True))
    >>> prior.names, prior.total > data.total > 0
    (('Q', 'K', 'V', 'up', 'down'), True)
    """
    given = dict(weights) if heads is None else _stacked(weights, heads)
    phi = "silu" if activation == "swiglu" and "gate" in weights else activation
    of = _Block(X, given, norm, norm_kind, eps, phi, mask, temperature)
    outputs = Outputs(lambda: of.output()[None].to(X.dtype), (1, *X.shape), (), X)
    loss = seen(outputs, target, grad, curvature, data=data)
    names = (*(name for name in of.names if name != "O" or heads is None or "o" in weights), "X")
    if data:
        t, functional = of.known(names, cast(Tensor, loss.gradient))
    else:
        t, functional = of.prior(names, cast(Sizes, loss.gradient))
    square = t[:, None] * t
    shown = names if heads is None else [name.lower() if name in HEADED else name for name in names]
    return selected(shown, wrt, loss.outer * square, loss.rest * square + functional)


def _stacked(weights: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The weights of `curvlens.assembly.block` with an axis of heads: Q, K, V and O."""
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise CurvlensError(f"heads={heads!r}; expected a number of heads, 1 or more.")
    missing = [name for name in ("q", "k", "v") if name not in weights and name.upper() not in weights]
    if missing:
        raise CurvlensError(f"A block with heads={heads} needs {', '.join(missing)}, as assembly.block takes them.")
    for name in weights:
        if name in HEADED:
            raise CurvlensError(
                f"heads={heads} and {name!r}, which has an axis of heads: leave heads= out, or give matrices "
                "q, k, v and o, as assembly.block takes them."
            )
        if name in ("q_bias", "k_bias", "v_bias", "o_bias"):
            raise CurvlensError(f"There is no bound with {name!r}: attention has no biases here.")
    found = {name: weight for name, weight in weights.items() if name.upper() not in HEADED}
    for name, weight in weights.items():
        if name in found:
            continue
        alike({name: weight})
        axis = 0 if name == "o" else 1
        if weight.ndim != 2 or weight.shape[axis] % heads:
            raise CurvlensError(
                f"{name!r} has shape {tuple(weight.shape)}, expected a matrix of which {heads} heads share the "
                f"{'rows' if name == 'o' else 'columns'}."
            )
        rows, columns = weight.shape
        apart = weight.reshape(heads, -1, columns) if name == "o" else weight.reshape(rows, heads, -1).movedim(1, 0)
        found[name.upper()] = apart
    if "O" not in found:  # outputs of heads are concatenated
        v = weights["v"]
        found["O"] = torch.eye(v.shape[1], dtype=v.dtype, device=v.device).view(heads, -1, v.shape[1])
    return found


class _Block:
    """A block with checked arguments."""

    def __init__(
        self,
        x: Tensor,
        weights: Mapping[str, Tensor],
        norm: str,
        kind: Kind,
        eps: float,
        activation: str,
        mask: str | Tensor | None,
        temperature: float,
    ) -> None:
        if norm not in ("pre", "post", "none"):
            raise CurvlensError(f"norm={norm!r}, expected 'pre', 'post' or 'none'.")
        if kind not in ("layer", "rms"):
            raise CurvlensError(f"norm_kind={kind!r}, expected 'layer' or 'rms'.")
        self.norm, self.kind, self.eps, self.activation = norm, kind, eps, activation
        self.mask, self.temperature = mask, temperature
        known = [name for name in NAMES if norm != "none" or name not in NORMS]
        strange = [name for name in weights if name not in known]
        missing = [name for name in ("Q", "K", "V", "up", "down") if name not in weights]
        for name in ("q", "k", "v", "o"):
            if name in strange:
                raise CurvlensError(
                    f"{name!r} is a weight as assembly.block takes it: give heads= with it, or {name.upper()!r}, which "
                    "may have an axis of heads."
                )
        if strange or missing:
            what = f"does not know {', '.join(map(repr, strange))}" if strange else f"needs {', '.join(missing)}"
            raise CurvlensError(f"A block with norm={norm!r} {what}; its weights are {', '.join(known)}.")
        self.names = tuple(name for name in NAMES if name in weights)
        alike({"X": x, **{name: weights[name] for name in self.names}})
        one_sample(x)
        d = x.shape[1]
        fit(x, {name: weights[name] for name in INNER if name in weights})
        of_norm.vectors(d, {name: weights[name] for name in NORMS if name in weights})
        norms.check(kind, eps)
        self.x = x.detach().double()
        self.w = {name: weights[name].detach().double() for name in self.names}
        for name, width in (("attention", self.attention(self.x).d_out), ("down", self.w["down"].shape[1])):
            if width != d:
                raise CurvlensError(f"{name} puts out {width} features and X has {d}: a skip adds the two.")

    def attention(self, tokens: Tensor) -> AttentionInputs:
        """The attention layer at tokens (L, d)."""
        value = (self.w["V"], self.w["O"]) if "O" in self.w else self.w["V"]
        q, k, mask, t = self.w["Q"], self.w["K"], self.mask, self.temperature
        return attention_inputs(tokens, q, k, value, mask=mask, temperature=t, kind="softmax", context=None)

    def _inner(self) -> dict[str, Tensor]:
        return {name: self.w[name] for name in INNER if name in self.w}

    def _vectors(self, which: str) -> tuple[Tensor | None, Tensor | None]:
        return self.w.get(f"{which}.scale"), self.w.get(f"{which}.shift")

    def output(self) -> Float[Tensor, "l d"]:
        """The output of the block, without derivatives."""

        def normed(tokens: Tensor, which: str) -> Tensor:
            return norms.forward(tokens, *self._vectors(which), eps=self.eps, kind=self.kind)

        def attend(tokens: Tensor) -> Tensor:
            return self.attention(tokens).output[0]

        def think(tokens: Tensor) -> Tensor:
            return forward(tokens, **self._inner(), activation=self.activation)

        x = self.x
        for which, inside in (("norm1", attend), ("norm2", think)):
            if self.norm == "pre":
                x = x + inside(normed(x, which))
            else:
                x = x + inside(x)
                x = normed(x, which) if self.norm == "post" else x
        return x

    def known(self, names: tuple[str, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        """t of the output and the functional part, both from the data."""
        return self._run(
            names,
            gradient,
            self.x,
            lambda x, which: of_norm.known(x, *self._vectors(which), self.eps, self.kind),
            lambda x: heads.known(self.attention(x)),
            lambda x: of_feedforward.known(x, self._inner(), self.activation),
        )

    def prior(self, names: tuple[str, ...], gradient: Sizes) -> tuple[Tensor, Tensor]:
        """t of the output and the functional part, both from sizes."""
        (length, d), of = self.x.shape, self.attention(self.x)
        return self._run(
            names,
            gradient,
            sizes(self.x, of_norm.spread(self.x, self.kind)),
            lambda x, which: of_norm.prior(x, length, d, *self._vectors(which), self.eps, self.kind),
            lambda x: heads.prior(x, length, of),
            lambda x: of_feedforward.prior(x, length, self._inner(), self.activation),
        )

    def _run(
        self,
        names: tuple[str, ...],
        gradient: S,
        tokens: S,
        norm: Callable[[S, str], Local[S]],
        attend: Callable[[S], Local[S]],
        think: Callable[[S], Local[S]],
    ) -> tuple[Tensor, Tensor]:
        tape: Tape[S] = Tape(names)
        x = tape.start(tokens)
        for which, inside in (("norm1", attend), ("norm2", think)):
            if self.norm == "pre":
                normed = tape.through(x, norm(x.value, which), f"{which}.")
                x = tape.plus(x, tape.through(normed, inside(normed.value)))
            else:
                x = tape.plus(x, tape.through(x, inside(x.value)))
                if self.norm == "post":
                    x = tape.through(x, norm(x.value, which), f"{which}.")
        return x.t, tape.bent(x, gradient)
