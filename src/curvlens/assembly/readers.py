"""Networks from modules: the reference GPT, GPT-2 of Hugging Face, and torch's Transformer encoder.

A module is recognised by its class and the module that defines it: another class of the same name may compute something
else. Parameters keep their names, order and storage, so the Hessian is that of ``module.named_parameters()``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens.assembly.circuit import View
from curvlens.assembly.layers import Attention, FeedForward, Layer, Mask, Multiply, Normalisation
from curvlens.assembly.network import Network
from curvlens.assembly.plain import check_mask
from curvlens.errors import CurvlensError, a_kind

HUGGING_FACE = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "identity",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in Hugging Face."""


def read(module: nn.Module, *, mask: Mask = None) -> Network:
    """The network of a module. The module must be in evaluation mode or have no dropout.

    Args:
        module: A `curvlens.models.GPT`, a ``GPT2Model`` or ``GPT2LMHeadModel`` of Hugging Face, or an
            ``nn.TransformerEncoderLayer`` or ``nn.TransformerEncoder`` with ``batch_first=True``.
        mask: For an encoder that is called with a mask: "causal", or a boolean tensor, True where a query may attend.
            (In torch's own boolean masks True means that it may *not*.) A GPT has its own mask and takes none.

    Labels are not shifted, although Hugging Face models do this inside. For tokens ``tok``, the Hessian of a language
    model is ``read(model).hessian(tok[:, :-1], labels=tok[:, 1:])``.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    >>> read(layer)
    Network of 24 primitives with 154 parameters in 12 tensors
    """
    kind, home = type(module).__name__, type(module).__module__
    for name, where, reader in READERS:
        if kind == name and re.fullmatch(where, home):
            _require_no_dropout(module)
            check_mask(mask)
            reading = _Reading(module, mask)
            reader(reading)
            _require_same(module, reading.network, mask)
            return reading.network
    known = ", ".join(dict.fromkeys(name for name, _, _ in READERS))
    raise CurvlensError(
        f"{home}.{kind} is not known; known are {known}. Any stack of Transformer layers can be given by its "
        "tensors: assembly.stack."
    )


@torch.no_grad()
def _require_same(module: nn.Module, network: Network, mask: Mask) -> None:
    """Check that module and network give the same output: no part was replaced, and no hook changes anything."""
    like = next(iter(network.circuit.parameters.values()))
    if like.is_meta:
        return
    length = mask.shape[-1] if isinstance(mask, Tensor) else 2
    options: dict[str, Tensor] = {}
    if network.embedding:
        sizes = [len(network.circuit.parameters[view.name]) for view in network.embedding]
        x = torch.arange(min(length, *sizes), device=like.device)[None]
    else:
        draws = torch.randn(1, length, network.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = draws.to(like)
        causal = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        allowed = causal if isinstance(mask, str) else mask
        options = {} if allowed is None else {"src_mask" if hasattr(module, "self_attn") else "mask": ~allowed}
        if isinstance(mask, Tensor) and mask.ndim != 2:
            return  # one mask for each sample, for which torch needs another shape
    found = module(x, **options)
    found = getattr(found, "logits", getattr(found, "last_hidden_state", found))
    apart = float((found - network.forward(x)).norm() / found.norm().clamp(min=1e-30))
    if not apart <= torch.finfo(like.dtype).eps ** 0.5:
        raise CurvlensError(
            f"The module does not compute what was read: outputs differ by {apart:.1g}. Is a part of it replaced or "
            "a class of your own, or does a hook change its output?"
        )


def _require_no_dropout(module: nn.Module) -> None:
    for path, part in module.named_modules():
        p = part.p if isinstance(part, nn.Dropout) else part.dropout if isinstance(part, nn.MultiheadAttention) else 0
        if part.training and p:
            raise CurvlensError(f"{path!r} drops out at random while training: call .eval() on the model first.")


class _Reading:
    """A module while it is read, and the network built from it."""

    def __init__(self, module: nn.Module, mask: Mask) -> None:
        self.module, self.mask = module, mask
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._state = 0
        self.network: Network

    def start(self, width: int, *tables: nn.Embedding) -> None:
        """Start an empty network with the given embedding tables."""
        if tables and self.mask is not None:
            raise CurvlensError(
                f"mask was given, but a {type(self.module).__name__} brings its own causal mask: leave mask= out. With "
                "another mask, build the network from its tensors: assembly.stack."
            )
        for table in tables:
            if type(table) is not nn.Embedding or table.max_norm is not None:
                raise CurvlensError(f"{self.path(table)!r} is {table}; expected an nn.Embedding without max_norm.")
        views = tuple(self.view(table.weight) for table in tables)
        self.network = Network(dict(self.module.named_parameters()), width, views)

    def add(self, part: Layer | Normalisation | Multiply) -> None:
        """Append a piece."""
        self._state = part.on(self.network.circuit, self._state)

    def path(self, part: nn.Module, *inside: str) -> str:
        """The path of a module, and a name inside it."""
        return ".".join(filter(None, (self._paths[id(part)], *inside)))

    def own(self, part: Any) -> str | None:
        """The path of an object, if it is a module."""
        return self._paths.get(id(part))

    def view(self, tensor: Tensor, **part: Any) -> View:
        """A parameter, or a part of it, by its name."""
        if id(tensor) not in self._names:
            raise CurvlensError(
                "A weight of the model is computed from others (a parametrisation?). It is not a parameter and cannot "
                "be read."
            )
        return View(self._names[id(tensor)], **part)

    def linear(self, part: nn.Module) -> Multiply:
        """An nn.Linear (outputs first) or a Conv1D (inputs first)."""
        return self.split(part, None)

    def split(self, part: nn.Module, outputs: tuple[int, int] | None) -> Multiply:
        """Some of the outputs of an nn.Linear or a Conv1D, or all."""
        if type(part) is not nn.Linear and type(part).__name__ != "Conv1D":
            raise CurvlensError(f"{self.path(part)!r} is {a_kind(part)}; expected an nn.Linear or a Conv1D.")
        weight, bias = part.weight, part.bias
        assert isinstance(weight, Tensor)
        return self.product(self.path(part), weight, bias, outputs, outputs_first=isinstance(part, nn.Linear))  # type: ignore[arg-type]

    def product(
        self, name: str, weight: Tensor, bias: Tensor | None, outputs: tuple[int, int] | None, *, outputs_first: bool
    ) -> Multiply:
        """A product with a weight, or with the part of it that makes some of the outputs."""
        some = outputs or (0, None)
        seen = self.view(weight, rows=some, transposed=True) if outputs_first else self.view(weight, columns=some)
        return Multiply(name, seen, None if bias is None else self.view(bias, columns=some))

    def norm(self, part: nn.Module | None) -> Normalisation | None:
        """An nn.LayerNorm or nn.RMSNorm over one axis; None for an identity."""
        if part is None or type(part) is nn.Identity:
            return None
        exact = type(part) in (nn.LayerNorm, nn.RMSNorm)  # a subclass may compute something else
        if (
            not isinstance(part, (nn.LayerNorm, nn.RMSNorm))
            or not exact
            or len(part.normalized_shape) != 1
            or part.eps is None
        ):
            raise CurvlensError(
                f"{self.path(part)!r} is {part}; expected a LayerNorm or RMSNorm over one axis, with eps."
            )
        rms = isinstance(part, nn.RMSNorm)
        given = (part.weight, None if isinstance(part, nn.RMSNorm) else part.bias)
        scale, shift = (self.view(vector) if isinstance(vector, Tensor) else None for vector in given)
        return Normalisation(self.path(part), scale, shift, float(part.eps), "rms" if rms else "layer")


def _reference_gpt(reading: _Reading) -> None:
    model: Any = reading.module
    c = model.reference_config
    reading.start(c.d_model, model.embed, model.pos)
    for block in model.h:
        attn, mlp = block.attn, block.mlp
        q, k, v, o = (reading.linear(part) for part in (attn.q, attn.k, attn.v, attn.o))
        scale = attn.head_dim**-0.5
        attention = Attention(reading.path(attn), q, k, v, o, attn.n_head, scale, "causal", attn.linear)
        forward = None
        if mlp is not None:
            gate = None if mlp.gate is None else reading.linear(mlp.gate)
            phi = "silu" if c.activation == "swiglu" else c.activation
            forward = FeedForward(reading.path(mlp), reading.linear(mlp.up), reading.linear(mlp.down), phi, gate)
        norms = reading.norm(block.norm1), reading.norm(block.norm2)
        reading.add(Layer(attention, norms[0], forward, norms[1], block.post, block.skip))
    final = reading.norm(model.final_norm)
    if final is not None:
        reading.add(final)
    reading.add(reading.linear(model.unembed))


def _gpt2(reading: _Reading) -> None:
    model: Any = reading.module
    base = model.transformer if hasattr(model, "transformer") else model
    config = base.config
    phi = HUGGING_FACE.get(config.activation_function)
    if phi is None:
        raise CurvlensError(
            f"The activation is {config.activation_function!r}; known are {', '.join(map(repr, HUGGING_FACE))}."
        )
    if config.add_cross_attention:
        raise CurvlensError("This GPT-2 has cross-attention, whose second input assembly.read does not know.")
    reading.start(config.n_embd, base.wte, base.wpe)
    for block in base.h:
        attn, mlp = block.attn, block.mlp
        d = attn.embed_dim
        q, k, v = (reading.split(attn.c_attn, (i * d, (i + 1) * d)) for i in range(3))
        o = reading.linear(attn.c_proj)
        attention = Attention(reading.path(attn), q, k, v, o, attn.num_heads, _gpt2_scale(attn), "causal")
        up, down = reading.linear(mlp.c_fc), reading.linear(mlp.c_proj)
        forward = FeedForward(reading.path(mlp), up, down, phi, inside=reading.own(mlp.act))
        reading.add(Layer(attention, reading.norm(block.ln_1), forward, reading.norm(block.ln_2)))
    final = reading.norm(base.ln_f)
    assert final is not None
    reading.add(final)
    if base is not model:
        reading.add(reading.linear(model.lm_head))


def _gpt2_scale(attn: Any) -> float:
    """τ of a layer, from its settings: older versions of transformers have no attribute for it."""
    scale = attn.head_dim**-0.5 if attn.scale_attn_weights else 1.0
    return float(scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale)


def _encoder_layer(reading: _Reading) -> None:
    layer: Any = reading.module
    reading.start(layer.linear1.in_features)
    _add_encoder_layer(reading, layer)


def _encoder(reading: _Reading) -> None:
    encoder: Any = reading.module
    if not len(encoder.layers):
        raise CurvlensError("The encoder has no layers.")
    reading.start(encoder.layers[0].linear1.in_features)
    for layer in encoder.layers:
        _add_encoder_layer(reading, layer)
    final = reading.norm(encoder.norm)
    if final is not None:
        reading.add(final)


def _add_encoder_layer(reading: _Reading, layer: Any) -> None:
    attn = layer.self_attn
    if attn.bias_k is not None or attn.add_zero_attn:
        raise CurvlensError("The attention has add_bias_kv or add_zero_attn, a key of its own: that is not read.")
    if not attn.batch_first:
        raise CurvlensError("The layer has batch_first=False, tokens before samples: build it with batch_first=True.")
    d, name = attn.embed_dim, reading.path(attn, "in_proj")
    q, k, v = (
        reading.product(name, attn.in_proj_weight, attn.in_proj_bias, (i * d, (i + 1) * d), outputs_first=True)
        for i in range(3)
    )
    out = attn.out_proj
    o = reading.product(reading.path(out), out.weight, out.bias, None, outputs_first=True)
    attention = Attention(reading.path(attn), q, k, v, o, attn.num_heads, attn.head_dim**-0.5, reading.mask)
    up, down = reading.linear(layer.linear1), reading.linear(layer.linear2)
    forward = FeedForward(
        reading.path(layer), up, down, _torch_activation(layer.activation), inside=reading.own(layer.activation)
    )
    reading.add(Layer(attention, reading.norm(layer.norm1), forward, reading.norm(layer.norm2), not layer.norm_first))


def _torch_activation(function: Any) -> str:
    for name, same, kind in (("relu", F.relu, nn.ReLU), ("gelu", F.gelu, nn.GELU), ("silu", F.silu, nn.SiLU)):
        if function is same or type(function) is kind:
            return "gelu_tanh" if getattr(function, "approximate", "none") == "tanh" else name
    raise CurvlensError(f"The activation is {function!r}; known are relu, gelu and silu of torch.")


READERS: tuple[tuple[str, str, Callable[[_Reading], None]], ...] = (
    ("GPT", r"curvlens\.models\..*", _reference_gpt),
    ("GPT2LMHeadModel", r"transformers\.models\.gpt2\..*", _gpt2),
    ("GPT2Model", r"transformers\.models\.gpt2\..*", _gpt2),
    ("TransformerEncoderLayer", r"torch\.nn\.modules\.transformer", _encoder_layer),
    ("TransformerEncoder", r"torch\.nn\.modules\.transformer", _encoder),
)
"""Class, module that defines it, and the function that reads it."""
