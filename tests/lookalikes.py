"""One GPT, stored in the ways of other libraries: the same function of the same weights under other names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from curvlens.models import GPT, GPTConfig

SIZES: dict[str, Any] = {"vocab": 7, "context": 5, "n_layer": 2, "n_head": 2, "d_model": 6, "d_mlp": 7}


def reference(**options: Any) -> GPT:
    """The reference GPT with gelu_tanh, as GPT-2 has it; weights, biases and norms drawn."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(**{**SIZES, "activation": "gelu_tanh", **options})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.add_(0.3 * torch.randn_like(p))
    return model


class Body(nn.Module):
    """Embeddings, layers, final norm and unembedding; subclasses say how things are called and stored."""

    def heads(self, i: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (batch, head, token, width)."""
        raise NotImplementedError

    def mixed(self, i: int, heads: Tensor) -> Tensor:
        """What attention writes, from (batch, head, token, width)."""
        raise NotImplementedError

    def mlp_of(self, i: int, h: Tensor) -> Tensor:
        raise NotImplementedError

    def embedded(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def norm_of(self, i: int, which: int, h: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for i in range(SIZES["n_layer"]):
            q, k, v = self.heads(i, self.norm_of(i, 1, x))
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            x = x + self.mixed(i, scores.masked_fill(~causal, -math.inf).softmax(-1) @ v)
            x = x + self.mlp_of(i, self.norm_of(i, 2, x))
        return self.logits(x)


class LensNorm(nn.Module):
    """A LayerNorm with TransformerLens's names."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.w, self.b, self.eps = nn.Parameter(norm.weight.clone()), nn.Parameter(norm.bias.clone()), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)


class LensAttention(nn.Module):
    """Weights (head, d_model, d_head) and (head, d_head, d_model)."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        n = attn.n_head
        for role, letter in zip("qkv", "QKV", strict=True):
            linear = getattr(attn, role)
            weight = linear.weight.detach().unflatten(0, (n, -1)).transpose(1, 2)
            self.register_parameter(f"W_{letter}", nn.Parameter(weight.clone()))
            self.register_parameter(f"b_{letter}", nn.Parameter(linear.bias.detach().unflatten(0, (n, -1)).clone()))
        self.W_O = nn.Parameter(attn.o.weight.detach().T.unflatten(0, (n, -1)).clone())
        self.b_O = nn.Parameter(attn.o.bias.detach().clone())


class LensMLP(nn.Module):
    """Weights in × out."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.W_in, self.b_in = nn.Parameter(mlp.up.weight.detach().T.clone()), nn.Parameter(mlp.up.bias.clone())
        self.W_out, self.b_out = nn.Parameter(mlp.down.weight.detach().T.clone()), nn.Parameter(mlp.down.bias.clone())


class Holder(nn.Module):
    """A module that holds parameters or modules under given names."""

    def __init__(self, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


class Lens(Body):
    """As a HookedTransformer of TransformerLens."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.embed = Holder(W_E=nn.Parameter(like.embed.weight.detach().clone()))
        self.pos_embed = Holder(W_pos=nn.Parameter(like.pos.weight.detach().clone()))
        self.blocks = nn.ModuleList(
            Holder(
                ln1=LensNorm(layer.norm1),
                attn=LensAttention(layer.attn),
                ln2=LensNorm(layer.norm2),
                mlp=LensMLP(layer.mlp),
            )
            for layer in like.h
        )
        self.ln_final = LensNorm(like.final_norm)
        self.unembed = Holder(W_U=nn.Parameter(like.unembed.weight.detach().T.clone()))

    def embedded(self, tokens: Tensor) -> Tensor:
        table: Any = self.embed.W_E
        positions: Any = self.pos_embed.W_pos
        x: Tensor = table[tokens] + positions[: tokens.shape[1]]
        return x

    def norm_of(self, i: int, which: int, h: Tensor) -> Tensor:
        norm: Tensor = getattr(self.blocks[i], f"ln{which}")(h)
        return norm

    def heads(self, i: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn: Any = self.blocks[i].attn
        q, k, v = (
            torch.einsum("btd,hdw->bhtw", h, getattr(attn, f"W_{x}")) + getattr(attn, f"b_{x}")[:, None] for x in "QKV"
        )
        return q, k, v

    def mixed(self, i: int, heads: Tensor) -> Tensor:
        attn: Any = self.blocks[i].attn
        y: Tensor = torch.einsum("bhtw,hwd->btd", heads, attn.W_O) + attn.b_O
        return y

    def mlp_of(self, i: int, h: Tensor) -> Tensor:
        mlp: Any = self.blocks[i].mlp
        y: Tensor = F.gelu(h @ mlp.W_in + mlp.b_in, approximate="tanh") @ mlp.W_out + mlp.b_out
        return y

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.ln_final(x) @ self.unembed.W_U
        return y


def _joined(linears: list[nn.Linear], order: Callable[[list[Tensor]], Tensor]) -> nn.Linear:
    """One linear layer of several."""
    weight = order([linear.weight.detach() for linear in linears])
    fused = nn.Linear(weight.shape[1], weight.shape[0]).double()
    fused.weight = nn.Parameter(weight)
    fused.bias = nn.Parameter(order([linear.bias.detach() for linear in linears]))
    return fused


class Fused(Body):
    """q, k, v in one linear layer: one after the other (as timm), or head by head (as GPT-NeoX)."""

    def __init__(self, like: Any, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved, n = interleaved, SIZES["n_head"]

        def order(tensors: list[Tensor]) -> Tensor:
            if not interleaved:
                return torch.cat(tensors)
            return torch.stack([x.view(n, -1, *x.shape[1:]) for x in tensors], dim=1).flatten(0, 2)

        layers = []
        for layer in like.h:
            qkv = _joined([layer.attn.q, layer.attn.k, layer.attn.v], order)
            if interleaved:
                attention = Holder(query_key_value=qkv, dense=layer.attn.o)
                mlp = Holder(dense_h_to_4h=layer.mlp.up, dense_4h_to_h=layer.mlp.down)
                norms = {"input_layernorm": layer.norm1, "post_attention_layernorm": layer.norm2}
                attention.head_size = SIZES["d_model"] // n
                layers.append(Holder(attention=attention, mlp=mlp, **norms))
            else:
                attention = Holder(qkv=qkv, proj=layer.attn.o)
                attention.head_dim = SIZES["d_model"] // n
                mlp = Holder(fc1=layer.mlp.up, fc2=layer.mlp.down)
                layers.append(Holder(attn=attention, mlp=mlp, norm1=layer.norm1, norm2=layer.norm2))
        if interleaved:
            self.embed_in, self.layers = like.embed, nn.ModuleList(layers)
            self.final_layer_norm, self.embed_out = like.final_norm, like.unembed
        else:
            self.embed, self.blocks = like.embed, nn.ModuleList(layers)
            self.norm, self.head = like.final_norm, like.unembed
        self.pos = like.pos

    def embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = (self.embed_in if self.interleaved else self.embed)(tokens) + self.pos.weight[: tokens.shape[1]]
        return x

    def _layer(self, i: int) -> Any:
        return (self.layers if self.interleaved else self.blocks)[i]

    def norm_of(self, i: int, which: int, h: Tensor) -> Tensor:
        names = ("input_layernorm", "post_attention_layernorm") if self.interleaved else ("norm1", "norm2")
        y: Tensor = getattr(self._layer(i), names[which - 1])(h)
        return y

    def heads(self, i: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = SIZES["n_head"]
        if self.interleaved:
            q, k, v = self._layer(i).attention.query_key_value(h).unflatten(-1, (n, 3, -1)).unbind(-2)
        else:
            q, k, v = self._layer(i).attn.qkv(h).unflatten(-1, (3, n, -1)).unbind(-3)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def mixed(self, i: int, heads: Tensor) -> Tensor:
        layer = self._layer(i)
        out = layer.attention.dense if self.interleaved else layer.attn.proj
        y: Tensor = out(heads.transpose(1, 2).flatten(2))
        return y

    def mlp_of(self, i: int, h: Tensor) -> Tensor:
        mlp = self._layer(i).mlp
        up, down = (mlp.dense_h_to_4h, mlp.dense_4h_to_h) if self.interleaved else (mlp.fc1, mlp.fc2)
        y: Tensor = down(F.gelu(up(h), approximate="tanh"))
        return y

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.embed_out(self.final_layer_norm(x)) if self.interleaved else self.head(self.norm(x))
        return y


def gpt2(like: Any) -> nn.Module:
    """Hugging Face's GPT-2 with the same weights; it is called with tokens and gives logits."""
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab"],
        n_positions=SIZES["context"],
        n_embd=SIZES["d_model"],
        n_layer=SIZES["n_layer"],
        n_head=SIZES["n_head"],
        n_inner=SIZES["d_mlp"],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    make: Any = transformers.GPT2LMHeadModel
    model: Any = make(config).double().eval()
    with torch.no_grad():
        model.transformer.wte.weight.copy_(like.embed.weight)
        model.transformer.wpe.weight.copy_(like.pos.weight)
        model.transformer.ln_f.load_state_dict(like.final_norm.state_dict())
        model.lm_head.weight.copy_(like.unembed.weight)
        for theirs, ours in zip(model.transformer.h, like.h, strict=True):
            theirs.ln_1.load_state_dict(ours.norm1.state_dict())
            theirs.ln_2.load_state_dict(ours.norm2.state_dict())
            a = ours.attn
            theirs.attn.c_attn.weight.copy_(torch.cat([a.q.weight.T, a.k.weight.T, a.v.weight.T], dim=1))
            theirs.attn.c_attn.bias.copy_(torch.cat([a.q.bias, a.k.bias, a.v.bias]))
            for target, source in (
                (theirs.attn.c_proj, a.o),
                (theirs.mlp.c_fc, ours.mlp.up),
                (theirs.mlp.c_proj, ours.mlp.down),
            ):
                target.weight.copy_(source.weight.T)
                target.bias.copy_(source.bias)
    assert isinstance(model, nn.Module)
    return model


class NanoAttention(nn.Module):
    """Attention as in nanoGPT: called as GPT-2's, stored as `nn.Linear`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.unflatten(t, 2, (self.n_head, -1)).transpose(1, 2)
            for t in torch.split(self.c_attn(x), self.n_embd, 2)
        )
        scores = (q @ k.mT) / k.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        result: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return result


class NanoGPT(nn.Module):
    """One layer of nanoGPT."""

    def __init__(self, width: int, heads: int = 2, vocab: int = 7, context: int = 5) -> None:
        super().__init__()
        layer: Any = nn.Module()
        layer.ln_1, layer.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        layer.attn = NanoAttention(width, heads)
        layer.mlp = nn.Module()
        layer.mlp.c_fc, layer.mlp.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList([layer]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](input_ids) + parts["wpe"](torch.arange(input_ids.shape[1]))
        for layer in parts["h"]:
            x = x + layer.attn(layer.ln_1(x))
            x = x + layer.mlp.c_proj(nn.functional.gelu(layer.mlp.c_fc(layer.ln_2(x))))
        result: Tensor = self.lm_head(parts["ln_f"](x))
        return result
