"""T5: encoder, decoder with cross-attention, relative positions in the first layer of each."""

from __future__ import annotations

from curvlens.blocks.family import Family, Rule, attention, each, embedding, linear, norm


def _stack(path: str, stack: str, feed_forward: int) -> tuple[Rule, ...]:
    layer, block = f"{path}.block.{{i}}.layer", f"{stack}.{{i}}"
    mlp = f"{layer}.{feed_forward}.DenseReluDense"
    return each(
        attention(f"{layer}.0.SelfAttention", f"{block}.attn", "q k v o"),
        [Rule(f"{layer}.0.SelfAttention.relative_attention_bias.weight", f"{stack}.pos", "in head")],
        *(norm(f"{layer}.{j}.layer_norm", f"{block}.norm{j + 1}") for j in range(feed_forward + 1)),
        linear(f"{mlp}.wi", f"{block}.mlp.up"),
        linear(f"{mlp}.wi_0", f"{block}.mlp.gate"),
        linear(f"{mlp}.wi_1", f"{block}.mlp.up"),
        linear(f"{mlp}.wo", f"{block}.mlp.down"),
        norm(f"{path}.final_layer_norm", f"{stack}.final_norm"),
        embedding(f"{path}.embed_tokens", f"{stack}.embed"),
    )


FAMILY = Family(
    "T5",
    each(
        embedding("shared", "embed"),
        _stack("encoder", "enc", 1),
        _stack("decoder", "dec", 2),
        attention("decoder.block.{i}.layer.1.EncDecAttention", "dec.{i}.cross", "q k v o"),
        linear("lm_head", "unembed"),
        linear("classification_head.dense", "classifier_dense"),
        linear("classification_head.out_proj", "classifier"),
        linear("classifier", "classifier"),
    ),
    checked=("t5",),
)
