"""A reference GPT in one short file, with the variants that the theory covers.

Block: x + attention(norm(x)), then x + mlp(norm(x)) ("pre"); norm(x + …) ("post"); or no norm at all ("none").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from curvlens.errors import CurvlensError

Norm = Literal["pre", "post", "none"]
NormKind = Literal["layer", "rms"]
Attention = Literal["softmax", "linear"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "identity"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": F.silu,
    "identity": lambda z: z,
}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and variants of a `GPT`. ``d_mlp=0`` leaves the feed-forward part out; None means 4·d_model."""

    vocab: int
    context: int
    n_layer: int = 2
    n_head: int = 2
    d_model: int = 32
    d_mlp: int | None = None
    norm: Norm = "pre"
    norm_kind: NormKind = "layer"
    attention: Attention = "softmax"
    activation: Activation = "gelu"
    tied: bool = False
    bias: bool = True
    attention_skip: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for field, allowed in (
            ("norm", Norm),
            ("norm_kind", NormKind),
            ("attention", Attention),
            ("activation", Activation),
        ):
            if getattr(self, field) not in get_args(allowed):
                raise CurvlensError(f"{field}={getattr(self, field)!r}, expected one of {get_args(allowed)}.")
        if self.d_model % self.n_head:
            raise CurvlensError(
                f"d_model={self.d_model} is not divisible by n_head={self.n_head}. Choose a multiple of n_head."
            )

    def norm_module(self) -> nn.Module:
        """The norm of this variant; the identity where there is none."""
        if self.norm == "none":
            return nn.Identity()
        if self.norm_kind == "rms":
            return nn.RMSNorm(self.d_model, eps=self.eps)
        return nn.LayerNorm(self.d_model, eps=self.eps, bias=self.bias)


class CausalAttention(nn.Module):
    """Σ_h softmax(Q_h K_hᵀ/√d_h + causal mask) V_h W_O, or the same with the scores themselves ("linear")."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.linear = c.n_head, c.attention == "linear"
        self.head_dim = c.d_model // c.n_head
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=c.bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, d_model) → the same."""
        q, k, v = (f(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.linear:
            heads = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).tril() @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """W_down φ(W_up x), or W_down (φ(W_gate x) ∘ W_up x) for SwiGLU."""

    def __init__(self, c: GPTConfig, width: int) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[c.activation]
        self.up = nn.Linear(c.d_model, width, bias=c.bias)
        self.gate = nn.Linear(c.d_model, width, bias=c.bias) if c.activation == "swiglu" else None
        self.down = nn.Linear(width, c.d_model, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, d_model) → the same."""
        h = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        y: Tensor = self.down(h)
        return y


class Block(nn.Module):
    """One layer: attention and feed-forward, each with its norm and its skip."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        width = 4 * c.d_model if c.d_mlp is None else c.d_mlp
        self.post, self.skip = c.norm == "post", c.attention_skip
        self.norm1, self.attn = c.norm_module(), CausalAttention(c)
        self.norm2 = c.norm_module() if width else None
        self.mlp = FeedForward(c, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, d_model) → the same."""
        mixed: Tensor = self.attn(x if self.post else self.norm1(x))
        x = x + mixed if self.skip else mixed
        x = self.norm1(x) if self.post else x
        if self.mlp is None or self.norm2 is None:
            return x
        y: Tensor = self.norm2(x + self.mlp(x)) if self.post else x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm (pre-LN only) and the unembedding.

    >>> logits = GPT(GPTConfig(vocab=12, context=8))(torch.zeros(1, 8, dtype=torch.long))
    >>> logits.shape
    torch.Size([1, 8, 12])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        c = self.reference_config = config
        self.embed = nn.Embedding(c.vocab, c.d_model)
        self.pos = nn.Embedding(c.context, c.d_model)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.final_norm = c.norm_module() if c.norm == "pre" else nn.Identity()
        self.unembed = nn.Linear(c.d_model, c.vocab, bias=False)
        if c.tied:
            self.unembed.weight = self.embed.weight
        self.initialise()

    def initialise(self, *, weight_std: float | None = None, embed_std: float | None = None) -> GPT:
        """Draw weights from N(0, 0.64/fan_in) and embeddings from N(0, 0.64/d_model), or with the given deviations."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = 0.8 / math.sqrt(module.in_features) if weight_std is None else weight_std
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for table in (self.embed, self.pos):
            std = 0.8 / math.sqrt(self.reference_config.d_model) if embed_std is None else embed_std
            nn.init.normal_(table.weight, std=std)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) → logits (batch, tokens, vocab)."""
        if tokens.shape[-1] > self.reference_config.context:
            raise CurvlensError(
                f"{tokens.shape[-1]} tokens given, but the context is {self.reference_config.context}. Give fewer "
                "tokens, or set GPTConfig(context=...)."
            )
        x = self.embed(tokens) + self.pos.weight[: tokens.shape[-1]]
        for block in self.h:
            x = block(x)
        logits: Tensor = self.unembed(self.final_norm(x))
        return logits

    def extra_repr(self) -> str:
        """The configuration, in one line."""
        return ", ".join(f"{key}={value}" for key, value in asdict(self.reference_config).items())
