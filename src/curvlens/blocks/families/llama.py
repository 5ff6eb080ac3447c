"""Llama and similar models (Mistral, Qwen2, Qwen3, Gemma, Mixtral), with grouped heads and mixtures of experts."""

from curvlens.blocks.family import Family, Rule, attention, each, embedding, linear, norm

LAYER = "layers.{i}"

RULES = each(
    attention(f"{LAYER}.self_attn", "h.{i}.attn"),
    norm(f"{LAYER}.self_attn.q_norm", "h.{i}.attn.q_norm"),
    norm(f"{LAYER}.self_attn.k_norm", "h.{i}.attn.k_norm"),
    *(linear(f"{LAYER}.mlp.{role}_proj", f"h.{{i}}.mlp.{role}") for role in ("gate", "up", "down")),
    # Experts in one tensor, or one module each.
    [
        Rule(f"{LAYER}.mlp.gate.weight", "h.{i}.mlp.router", "out in"),
        Rule(f"{LAYER}.mlp.experts.gate_up_proj", "h.{i}.mlp.*", "expert (gate/up out) in"),
        Rule(f"{LAYER}.mlp.experts.down_proj", "h.{i}.mlp.down", "expert out in"),
        Rule(f"{LAYER}.block_sparse_moe.gate.weight", "h.{i}.mlp.router", "out in"),
        Rule(f"{LAYER}.block_sparse_moe.experts.{{e}}.w1.weight", "h.{i}.mlp.gate", "out in"),
        Rule(f"{LAYER}.block_sparse_moe.experts.{{e}}.w3.weight", "h.{i}.mlp.up", "out in"),
        Rule(f"{LAYER}.block_sparse_moe.experts.{{e}}.w2.weight", "h.{i}.mlp.down", "out in"),
    ],
    *(linear(f"{LAYER}.mlp.experts.{{e}}.{role}_proj", f"h.{{i}}.mlp.{role}") for role in ("gate", "up", "down")),
    norm(f"{LAYER}.input_layernorm", "h.{i}.norm1"),
    norm(f"{LAYER}.post_attention_layernorm", "h.{i}.norm2"),
    embedding("embed_tokens", "embed"),
    norm("norm", "final_norm"),
    linear("lm_head", "unembed"),
    linear("score", "classifier"),
)

NOT_FOR = ("gpt_oss", "qwen3_next")
"""gpt_oss stores its experts in × out, with gate and up alternating; qwen3_next has a gate next to each query head."""

FAMILY = Family("Llama", RULES, checked=("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral"), not_for=NOT_FOR)
