"""GPT-NeoX and Pythia: q, k, v of each head follow each other in one tensor."""

from curvlens.blocks.family import Family, Rule, each, embedding, heads_in, linear, norm

FAMILY = Family(
    "GPT-NeoX",
    each(
        [
            Rule("layers.{i}.attention.query_key_value.weight", "h.{i}.attn.*", "(head q/k/v dim) in"),
            Rule("layers.{i}.attention.query_key_value.bias", "h.{i}.attn.*", "(head q/k/v dim)"),
        ],
        heads_in("layers.{i}.attention.dense", "h.{i}.attn.o"),
        linear("layers.{i}.mlp.dense_h_to_4h", "h.{i}.mlp.up"),
        linear("layers.{i}.mlp.dense_4h_to_h", "h.{i}.mlp.down"),
        norm("layers.{i}.input_layernorm", "h.{i}.norm1"),
        norm("layers.{i}.post_attention_layernorm", "h.{i}.norm2"),
        embedding("embed_in", "embed"),
        norm("final_layer_norm", "final_norm"),
        linear("lm_head", "unembed"),
        linear("embed_out", "unembed"),
        linear("score", "classifier"),
    ),
    checked=("gpt_neox",),
)
