"""DistilBERT: BERT with short names."""

from curvlens.blocks.families.bert import EMBEDDINGS
from curvlens.blocks.family import Family, attention, each, linear, norm

LAYER = "transformer.layer.{i}"

FAMILY = Family(
    "DistilBERT",
    each(
        EMBEDDINGS,
        attention(f"{LAYER}.attention", "h.{i}.attn", "q_lin k_lin v_lin out_lin"),
        linear(f"{LAYER}.ffn.lin1", "h.{i}.mlp.up"),
        linear(f"{LAYER}.ffn.lin2", "h.{i}.mlp.down"),
        norm(f"{LAYER}.sa_layer_norm", "h.{i}.norm1"),
        norm(f"{LAYER}.output_layer_norm", "h.{i}.norm2"),
        linear("vocab_transform", "unembed_dense"),
        norm("vocab_layer_norm", "unembed_norm"),
        linear("vocab_projector", "unembed"),
        linear("pre_classifier", "classifier_dense"),
        linear("classifier", "classifier"),
    ),
    checked=("distilbert",),
)
