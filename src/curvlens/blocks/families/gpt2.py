"""GPT-2: Conv1D (in × out), and q, k, v in one tensor; and with nn.Linear in its place, as in nanoGPT."""

from curvlens.blocks.family import Family, Rule, each, embedding, linear, norm

FAMILY = Family(
    "GPT-2",
    each(
        [
            Rule("h.{i}.attn.c_attn.weight", "h.{i}.attn.*", "in (q/k/v head dim)"),
            Rule("h.{i}.attn.c_attn.weight", "h.{i}.attn.*", "(q/k/v head dim) in"),
            Rule("h.{i}.attn.c_attn.bias", "h.{i}.attn.*", "(q/k/v head dim)"),
            Rule("h.{i}.attn.c_proj.weight", "h.{i}.attn.o", "(head dim) out"),
            Rule("h.{i}.attn.c_proj.weight", "h.{i}.attn.o", "out (head dim)"),
            Rule("h.{i}.attn.c_proj.bias", "h.{i}.attn.o", "out"),
            # Cross-attention: keys and values come from elsewhere and have a tensor of their own.
            Rule("h.{i}.crossattention.q_attn.weight", "h.{i}.cross.q", "in (head dim)"),
            Rule("h.{i}.crossattention.q_attn.bias", "h.{i}.cross.q", "(head dim)"),
            Rule("h.{i}.crossattention.c_attn.weight", "h.{i}.cross.*", "in (k/v head dim)"),
            Rule("h.{i}.crossattention.c_attn.bias", "h.{i}.cross.*", "(k/v head dim)"),
            Rule("h.{i}.crossattention.c_proj.weight", "h.{i}.cross.o", "(head dim) out"),
            Rule("h.{i}.crossattention.c_proj.bias", "h.{i}.cross.o", "out"),
            Rule("h.{i}.mlp.c_fc.weight", "h.{i}.mlp.up", "in out"),
            Rule("h.{i}.mlp.c_fc.weight", "h.{i}.mlp.up", "out in"),
            Rule("h.{i}.mlp.c_fc.bias", "h.{i}.mlp.up", "out"),
            Rule("h.{i}.mlp.c_proj.weight", "h.{i}.mlp.down", "in out"),
            Rule("h.{i}.mlp.c_proj.weight", "h.{i}.mlp.down", "out in"),
            Rule("h.{i}.mlp.c_proj.bias", "h.{i}.mlp.down", "out"),
        ],
        norm("h.{i}.ln_1", "h.{i}.norm1"),
        norm("h.{i}.ln_2", "h.{i}.norm2"),
        norm("h.{i}.ln_cross_attn", "h.{i}.norm_cross"),
        embedding("wte", "embed"),
        embedding("wpe", "pos"),
        norm("ln_f", "final_norm"),
        linear("lm_head", "unembed"),
        linear("score", "classifier"),
        linear("classifier", "classifier"),
    ),
    checked=("gpt2",),
    not_for=("gpt_bigcode",),  # q, k and v side by side within a head, or one k and v for all
)
