"""ALBERT: one layer, or a few, that the model goes through many times."""

from curvlens.blocks.families.bert import EMBEDDINGS, HEADS
from curvlens.blocks.family import Family, each, heads_in, heads_out, linear, norm

LAYER = "albert_layer_groups.{i}.albert_layers.{any}"

FAMILY = Family(
    "ALBERT",
    each(
        EMBEDDINGS,
        *(
            heads_out(f"{LAYER}.attention.{name}", f"h.{{i}}.attn.{role}")
            for role, name in {"q": "query", "k": "key", "v": "value"}.items()
        ),
        heads_in(f"{LAYER}.attention.dense", "h.{i}.attn.o"),
        norm(f"{LAYER}.attention.LayerNorm", "h.{i}.norm1"),
        linear(f"{LAYER}.ffn", "h.{i}.mlp.up"),
        linear(f"{LAYER}.ffn_output", "h.{i}.mlp.down"),
        norm(f"{LAYER}.full_layer_layer_norm", "h.{i}.norm2"),
        HEADS,
    ),
)
