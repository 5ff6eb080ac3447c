"""Phi-3: as Llama, with q, k, v in one tensor of unequal parts, and gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from curvlens.blocks.families.llama import LAYER, NOT_FOR, RULES
from curvlens.blocks.family import Family, Rule, each


def _sizes(module: nn.Module) -> Mapping[str, int]:
    config, width = getattr(module, "config", None), getattr(module, "head_dim", None)
    if config is None or width is None:
        return {}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return {"q": heads * width, "k": groups * width, "v": groups * width}


FAMILY = Family(
    "Phi-3",
    each(
        [
            Rule(f"{LAYER}.self_attn.qkv_proj.weight", "h.{i}.attn.*", "q:head+k:head+v:head in"),
            Rule(f"{LAYER}.self_attn.qkv_proj.bias", "h.{i}.attn.*", "q:head+k:head+v:head"),
            Rule(f"{LAYER}.mlp.gate_up_proj.weight", "h.{i}.mlp.*", "(gate/up out) in"),
        ],
        RULES,
    ),
    _sizes,
    checked=("phi3",),
    not_for=NOT_FOR,
)
