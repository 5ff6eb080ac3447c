"""Networks from plain tensors: one layer, or a stack of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from curvlens.assembly.circuit import View
from curvlens.assembly.layers import Attention, FeedForward, Layer, Mask, Multiply, Normalisation
from curvlens.assembly.network import Network
from curvlens.calculus.activations import activation as known_activation
from curvlens.calculus.norms import Kind
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError, a_kind, nearest

Weights = Mapping[str, Tensor]
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")
VECTORS = ("norm1.scale", "norm1.shift", "norm2.scale", "norm2.shift")
KNOWN = (*MATRICES, *(f"{name}_bias" for name in MATRICES), *VECTORS)


@dataclass(frozen=True)
class Settings:
    """The settings that all layers of a network share."""

    heads: int
    norm: str
    norm_kind: Kind
    activation: str
    mask: Mask
    eps: float

    def __post_init__(self) -> None:
        if self.norm not in ("pre", "post", "none"):
            raise CurvlensError(f"norm={self.norm!r}, expected 'pre', 'post' or 'none'.")
        if self.norm_kind not in get_args(Kind):
            raise CurvlensError(f"norm_kind={self.norm_kind!r}, expected 'layer' or 'rms'.")
        if self.activation != "swiglu":
            known_activation(self.activation)
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not 0 <= self.eps < math.inf:
            raise CurvlensError(f"eps={self.eps!r}; expected a number, 0 or more.")
        check_mask(self.mask)


def block(
    weights: Weights,
    *,
    heads: int,
    norm: str = "pre",
    norm_kind: Kind = "layer",
    activation: str = "gelu",
    mask: Mask = None,
    eps: float = 1e-5,
) -> Network:
    """One layer, x + attention(norm(x)) and x + mlp(norm(x)), from its weights by name, inputs first (x W).

    The names, and the shapes for tokens of width d::

        q, k (d, heads·e)    v (d, heads·f)    o (heads·f, d), optional
        up (d, m)    gate (d, m), for a gated feed-forward    down (m, d); without up and down there is attention alone
        q_bias, …, down_bias, each optional
        norm1.scale, norm1.shift, norm2.scale, norm2.shift (d,), each optional; none with norm="none"

    The Hessian has the parameters in the order in which they were given. `curvlens.calculus.bounds.block` takes the
    same weights and options.

    Args:
        weights: Tensors by name.
        heads: The number of heads that q, k and v are split into.
        norm: "pre", "post" (a norm after every residual sum), or "none".
        norm_kind: "layer" or "rms".
        activation: "gelu", "gelu_tanh", "relu", "silu", "identity", or "swiglu": silu with a gate.
        mask: "causal", None, or a boolean tensor (T, T) or (B, T, T), True where a query may attend.
        eps: ε of the norms.

    >>> weights = {name: torch.eye(2) for name in ("q", "k", "v", "o")}
    >>> net = block(weights, heads=1, norm="none", mask="causal")
    >>> H = net.hessian(torch.eye(3, 2), target=torch.zeros(3, 2))
    >>> H.total.names, H.part_names[-2:]
    (('q', 'k', 'v', 'o'), ('attn.mix', 'attn.o'))
    """
    settings = Settings(heads, norm, norm_kind, activation, mask, eps)
    width = _check(weights, settings, "")
    network = Network(weights, width)
    _layer(weights, settings, "").on(network.circuit, 0)
    return network


def stack(
    layers: Sequence[Weights],
    *,
    heads: int,
    norm: str = "pre",
    norm_kind: Kind = "layer",
    activation: str = "gelu",
    mask: Mask = "causal",
    eps: float = 1e-5,
    embedding: Tensor | tuple[Tensor, Tensor] | None = None,
    final_norm: Weights | None = None,
    unembedding: Tensor | None = None,
) -> Network:
    """A stack of layers as in `block`, with optional embedding, final norm and unembedding.

    The names of parameters and parts are those of the layers with the prefix ``h.0.``, ``h.1.``, …

    Args:
        layers: The weights of every layer by the names in `block`.
        heads: As in `block`; the same holds for norm, norm_kind, activation, mask and eps.
        norm: "pre", "post" or "none".
        norm_kind: "layer" or "rms".
        activation: The activation of all layers.
        mask: The mask of all layers.
        eps: ε of the norms.
        embedding: A table (vocabulary, d), or a pair of that and a table of positions: parameters ``embedding`` and
            ``positions``.
        final_norm: {"scale": …, "shift": …}, each optional, for a norm after the layers: parameters
            ``final_norm.scale`` and ``final_norm.shift``.
        unembedding: (d, classes), the parameter ``unembedding``; its part is ``unembed``.
    """
    settings = Settings(heads, norm, norm_kind, activation, mask, eps)
    if not layers:
        raise CurvlensError("A stack needs at least one layer.")
    widths = [_check(weights, settings, f"h.{i}.") for i, weights in enumerate(layers)]
    if len(set(widths)) > 1:
        raise CurvlensError(f"The layers have widths {widths}; in a stack they must be equal.")
    parameters: dict[str, Tensor] = {}
    tables = () if embedding is None else embedding if isinstance(embedding, tuple) else (embedding,)
    if len(tables) > 2:
        raise CurvlensError(f"embedding has {len(tables)} tables; expected one, or one of tokens and one of positions.")
    parameters |= dict(zip(("embedding", "positions"), tables, strict=False))
    for i, weights in enumerate(layers):
        parameters |= {f"h.{i}.{name}": weight for name, weight in weights.items()}
    if not isinstance(final_norm, Mapping | None):
        raise CurvlensError(f"final_norm is {a_kind(final_norm)}; expected {{'scale': …, 'shift': …}}.")
    ends = dict(final_norm or {})
    for name in ends:
        if name not in ("scale", "shift"):
            raise CurvlensError(f"final_norm has {name!r}; it may have 'scale' and 'shift'.")
    parameters |= {f"final_norm.{name}": vector for name, vector in ends.items()}
    if unembedding is not None:
        parameters["unembedding"] = unembedding
    for name, tensor in parameters.items():
        if name in ("embedding", "positions", "unembedding") or name.startswith("final_norm."):
            alike({name: tensor})
            _check_end(name, tensor, widths[0])
    network = Network(parameters, widths[0], tuple(View(name) for name in ("embedding", "positions")[: len(tables)]))
    state = 0
    for i, weights in enumerate(layers):
        state = _layer(weights, settings, f"h.{i}.").on(network.circuit, state)
    if final_norm is not None:
        scale, shift = (View(f"final_norm.{name}") if name in ends else None for name in ("scale", "shift"))
        state = Normalisation("final_norm", scale, shift, eps, norm_kind).on(network.circuit, state)
    if unembedding is not None:
        Multiply("unembed", View("unembedding")).on(network.circuit, state)
    return network


def _layer(weights: Weights, settings: Settings, prefix: str) -> Layer:
    def product(name: str, path: str) -> Multiply:
        bias = View(f"{prefix}{name}_bias") if f"{name}_bias" in weights else None
        return Multiply(f"{prefix}{path}.{name}", View(prefix + name), bias)

    def normalisation(name: str) -> Normalisation | None:
        if settings.norm == "none":
            return None
        found = [f"{name}.{kind}" for kind in ("scale", "shift")]
        scale, shift = (View(prefix + kind) if kind in weights else None for kind in found)
        return Normalisation(prefix + name, scale, shift, settings.eps, settings.norm_kind)

    attention = Attention(
        f"{prefix}attn",
        product("q", "attn"),
        product("k", "attn"),
        product("v", "attn"),
        product("o", "attn") if "o" in weights else None,
        settings.heads,
        scale=(weights["q"].shape[1] // settings.heads) ** -0.5,
        mask=settings.mask,
    )
    mlp = None
    if "up" in weights:
        gate = product("gate", "mlp") if "gate" in weights else None
        phi = "silu" if settings.activation == "swiglu" else settings.activation
        mlp = FeedForward(f"{prefix}mlp", product("up", "mlp"), product("down", "mlp"), phi, gate)
    post = settings.norm == "post"
    return Layer(attention, normalisation("norm1"), mlp, normalisation("norm2") if mlp else None, post)


# Checks of the arguments


def check_mask(mask: Mask) -> None:
    """Check that a mask is "causal", None, or boolean."""
    known = mask.dtype == torch.bool if isinstance(mask, Tensor) else mask in (None, "causal")
    if known:
        return
    given = f"{mask.dtype}" if isinstance(mask, Tensor) else repr(mask)
    raise CurvlensError(f"mask is {given}, expected 'causal', None or a boolean tensor, True where attended.")


def _check(weights: Weights, settings: Settings, prefix: str) -> int:
    """Check that all weights are given and fit each other; return d."""
    for name in weights:
        if name not in KNOWN:
            raise CurvlensError(f"There is no weight {prefix + name!r}. {nearest(str(name), KNOWN)}")
    needed = ["q", "k", "v"] + (["up", "down"] if {"up", "down", "gate"} & set(weights) else [])
    needed += ["gate"] if settings.activation == "swiglu" and "up" in weights else []
    missing = [prefix + name for name in needed if name not in weights]
    if missing:
        raise CurvlensError(f"{missing[0]!r} is missing: a layer has the weights {', '.join(needed)}.")
    for name in weights:
        owner = name.removesuffix("_bias") if name.endswith("_bias") else "up" if name.startswith("norm2.") else name
        if owner not in weights:
            raise CurvlensError(f"{prefix + name!r} was given without {prefix + owner!r}, to which it belongs.")
    if settings.norm == "none" and any(name in weights for name in VECTORS):
        raise CurvlensError("norm='none', but there are weights of a norm; give norm='pre' or 'post'.")
    alike({prefix + name: tensor for name, tensor in weights.items()})
    for name in MATRICES:
        if name in weights and weights[name].ndim != 2:
            raise CurvlensError(f"{prefix + name!r} has shape {tuple(weights[name].shape)}, expected a matrix.")
    d, keys = weights["q"].shape
    values, inner = weights["v"].shape[1], weights["up"].shape[1] if "up" in weights else 0
    for name, size in (("q", keys), ("v", values)):
        if not isinstance(settings.heads, int) or settings.heads < 1 or size % settings.heads:
            raise CurvlensError(f"{prefix + name!r} has {size} columns, which {settings.heads!r} heads cannot share.")
    expected: dict[str, tuple[int, ...]] = {
        "q": (d, keys), "k": (d, keys), "v": (d, values if "o" in weights else d), "o": (values, d),
        "up": (d, inner), "gate": (d, inner), "down": (inner, d),
    }  # fmt: skip
    expected |= {f"{name}_bias": (shape[1],) for name, shape in expected.items()}
    expected |= dict.fromkeys(VECTORS, (d,))
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            turned = tensor.ndim == 2 and tuple(tensor.T.shape) == expected[name]
            hint = " nn.Linear stores the outputs first: give its weight.T." if turned else ""
            raise CurvlensError(
                f"{prefix + name!r} has shape {tuple(tensor.shape)}, expected {expected[name]} with q of shape "
                f"{(d, keys)}.{hint}"
            )
    return d


def _check_end(name: str, tensor: Tensor, d: int) -> None:
    axis, ndim = (0, 1) if name.startswith("final_norm.") else (0, 2) if name == "unembedding" else (1, 2)
    if tensor.ndim != ndim or tensor.shape[axis] != d:
        shape = f"({d},)" if ndim == 1 else f"({d}, classes)" if axis == 0 else f"(rows, {d})"
        raise CurvlensError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}.")
