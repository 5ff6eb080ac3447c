"""Gemma 2 and 3: as Llama, with a norm before and one after each of attention and feed-forward."""

from curvlens.blocks.families.llama import LAYER, NOT_FOR, RULES
from curvlens.blocks.family import Family, each, norm

FAMILY = Family(
    "Gemma",
    each(
        norm(f"{LAYER}.post_attention_layernorm", "h.{i}.norm1_post"),
        norm(f"{LAYER}.pre_feedforward_layernorm", "h.{i}.norm2"),
        norm(f"{LAYER}.post_feedforward_layernorm", "h.{i}.norm2_post"),
        RULES,
    ),
    checked=("gemma2", "gemma3", "gemma3_text"),
    not_for=NOT_FOR,
)
