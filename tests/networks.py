"""The papers' networks as reference GPTs."""

from __future__ import annotations

from typing import Any

import torch

from curvlens.models import GPT, GPTConfig
from curvlens.papers import setting


def gpt(width: int, layers: int, norm: str = "none", attention: str = "softmax", activation: str = "relu") -> GPT:
    """One head, no biases: the networks of the papers."""
    config = GPTConfig(
        vocab=12,
        context=17,
        n_layer=layers,
        n_head=1,
        d_model=width,
        norm=norm,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        bias=False,
    )
    return GPT(config).double()


def set_weights(model: GPT, w: setting.Weights) -> None:
    """Those of the papers' setting, in the reference GPT."""
    block: Any = model.h[0]
    pairs: dict[Any, torch.Tensor] = {
        model.embed: w.embed.T,
        model.pos: w.pos.T,
        block.attn.q: w.layer.q,
        block.attn.k: w.layer.k,
        block.attn.v: w.layer.v,
        block.attn.o: w.layer.o,
        block.mlp.up: w.layer.up,
        block.mlp.down: w.layer.down,
        model.unembed: w.unembed,
    }
    with torch.no_grad():
        for module, weight in pairs.items():
            module.weight.copy_(weight.T)
