"""BART, OPT, Whisper and CLIP: attention with an ``out_proj``, feed-forward in the layer itself or in ``mlp``."""

from __future__ import annotations

from curvlens.blocks.family import Family, Rule, attention, each, embedding, linear, norm

NAMES = "q_proj k_proj v_proj out_proj"


def _layer(path: str, block: str) -> tuple[Rule, ...]:
    return each(
        attention(f"{path}.self_attn", f"{block}.attn", NAMES),
        attention(f"{path}.encoder_attn", f"{block}.cross", NAMES),
        linear(f"{path}.fc1", f"{block}.mlp.up"),
        linear(f"{path}.fc2", f"{block}.mlp.down"),
        linear(f"{path}.mlp.fc1", f"{block}.mlp.up"),
        linear(f"{path}.mlp.fc2", f"{block}.mlp.down"),
        norm(f"{path}.self_attn_layer_norm", f"{block}.norm1"),
        norm(f"{path}.encoder_attn_layer_norm", f"{block}.norm_cross"),
        norm(f"{path}.final_layer_norm", f"{block}.norm2"),
        norm(f"{path}.layer_norm1", f"{block}.norm1"),
        norm(f"{path}.layer_norm2", f"{block}.norm2"),
    )


def _stack(path: str, stack: str) -> tuple[Rule, ...]:
    return each(
        _layer(f"{path}.layers.{{i}}", f"{stack}.{{i}}"),
        embedding(f"{path}.embed_tokens", f"{stack}.embed"),
        embedding(f"{path}.embed_positions", f"{stack}.pos"),
        norm(f"{path}.layernorm_embedding", f"{stack}.embed_norm"),
        norm(f"{path}.final_layer_norm", f"{stack}.final_norm"),
        norm(f"{path}.layer_norm", f"{stack}.final_norm"),
    )


FAMILY = Family(
    "BART",
    each(
        embedding("shared", "embed"),
        _stack("encoder", "enc"),
        _stack("decoder", "dec"),
        _layer("layers.{i}", "h.{i}"),
        embedding("embeddings.token_embedding", "embed"),
        embedding("embeddings.position_embedding", "pos"),
        [
            Rule("embeddings.class_embedding", "cls", "out"),
            Rule("embeddings.patch_embedding.weight", "embed", "out in in in"),
        ],
        norm("pre_layrnorm", "embed_norm"),
        norm("post_layernorm", "final_norm"),
        norm("final_layer_norm", "final_norm"),
        linear("lm_head", "unembed"),
        linear("proj_out", "unembed"),
        linear("score", "classifier"),
    ),
    checked=("bart", "opt"),
)
