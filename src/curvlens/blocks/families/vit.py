"""ViT of Hugging Face, with its current and its older parameter names."""

from curvlens.blocks.family import Family, Rule, attention, each, linear, norm

FAMILY = Family(
    "ViT",
    each(
        [
            Rule("embeddings.cls_token", "cls", "x x out"),
            Rule("embeddings.mask_token", "mask_token", "x x out"),
            Rule("embeddings.position_embeddings", "pos", "x in out"),
            Rule("embeddings.patch_embeddings.projection.weight", "embed", "out in in in"),
            Rule("embeddings.patch_embeddings.projection.bias", "embed", "out"),
        ],
        attention("layers.{i}.attention", "h.{i}.attn"),
        linear("layers.{i}.mlp.fc1", "h.{i}.mlp.up"),
        linear("layers.{i}.mlp.fc2", "h.{i}.mlp.down"),
        norm("layers.{i}.layernorm_before", "h.{i}.norm1"),
        norm("layers.{i}.layernorm_after", "h.{i}.norm2"),
        attention("layer.{i}.attention", "h.{i}.attn", "attention.query attention.key attention.value output.dense"),
        linear("layer.{i}.intermediate.dense", "h.{i}.mlp.up"),
        linear("layer.{i}.output.dense", "h.{i}.mlp.down"),
        norm("layer.{i}.layernorm_before", "h.{i}.norm1"),
        norm("layer.{i}.layernorm_after", "h.{i}.norm2"),
        norm("layernorm", "final_norm"),
        linear("pooler.dense", "pooler"),
        linear("classifier", "classifier"),
    ),
    checked=("vit",),
)
