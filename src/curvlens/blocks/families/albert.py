"""ALBERT: one layer, or a few, that the model applies many times."""

from curvlens.blocks.families.bert import EMBEDDINGS, HEADS
from curvlens.blocks.family import Family, attention, each, linear, norm

LAYER = "albert_layer_groups.{i}.albert_layers.{any}"

FAMILY = Family(
    "ALBERT",
    each(
        EMBEDDINGS,
        attention(f"{LAYER}.attention", "h.{i}.attn", "query key value dense"),
        norm(f"{LAYER}.attention.LayerNorm", "h.{i}.norm1"),
        linear(f"{LAYER}.ffn", "h.{i}.mlp.up"),
        linear(f"{LAYER}.ffn_output", "h.{i}.mlp.down"),
        norm(f"{LAYER}.full_layer_layer_norm", "h.{i}.norm2"),
        HEADS,
    ),
    checked=("albert",),
)
