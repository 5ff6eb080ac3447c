"""HookedTransformer of TransformerLens: heads on an axis of their own, weights in × out."""

from curvlens.blocks.family import Family, Rule, each

BLOCK, ATTN = "blocks.{i}", "blocks.{i}.attn"

FAMILY = Family(
    "TransformerLens",
    each(
        (Rule(f"{ATTN}.W_{role}", f"h.{{i}}.attn.{role.lower()}", "head in dim") for role in "QKV"),
        (Rule(f"{ATTN}._W_{role}", f"h.{{i}}.attn.{role.lower()}", "head in dim") for role in "KV"),
        (Rule(f"{ATTN}.b_{role}", f"h.{{i}}.attn.{role.lower()}", "head dim") for role in "QKV"),
        (Rule(f"{ATTN}._b_{role}", f"h.{{i}}.attn.{role.lower()}", "head dim") for role in "KV"),
        [
            Rule(f"{ATTN}.W_O", "h.{i}.attn.o", "head dim out"),
            Rule(f"{ATTN}.b_O", "h.{i}.attn.o", "out"),
            Rule(f"{BLOCK}.mlp.W_in", "h.{i}.mlp.up", "in out"),
            Rule(f"{BLOCK}.mlp.b_in", "h.{i}.mlp.up", "out"),
            Rule(f"{BLOCK}.mlp.W_gate", "h.{i}.mlp.gate", "in out"),
            Rule(f"{BLOCK}.mlp.W_out", "h.{i}.mlp.down", "in out"),
            Rule(f"{BLOCK}.mlp.b_out", "h.{i}.mlp.down", "out"),
            Rule("embed.W_E", "embed", "in out"),
            Rule("pos_embed.W_pos", "pos", "in out"),
            Rule("unembed.W_U", "unembed", "in out"),
            Rule("unembed.b_U", "unembed", "out"),
        ],
        (
            Rule(f"{path}.{letter}", block, "out")
            for path, block in {
                f"{BLOCK}.ln1": "h.{i}.norm1",
                f"{BLOCK}.ln2": "h.{i}.norm2",
                "ln_final": "final_norm",
            }.items()
            for letter in "wb"
        ),
    ),
)
