"""The papers' networks as reference GPTs, and products with their Hessians."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    pairs: dict[Any, Tensor] = {
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


def close(found: Tensor, truth: Tensor, rel: float = 1e-10) -> None:
    """‖found − truth‖ is at most ``rel`` of ‖truth‖."""
    assert float((found - truth).norm()) <= rel * float(truth.norm())


def product(model: nn.Module, ids: Tensor, labels: Tensor, parameters: list[Tensor], v: Tensor) -> Tensor:
    """H v of the cross-entropy, reverse over reverse."""
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = torch.cat([grad.flatten() for grad in grads]) @ v
        found = torch.autograd.grad(inner, parameters, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])
