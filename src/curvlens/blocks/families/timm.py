"""Vision Transformers of timm, by the names of their parameters."""

from curvlens.blocks.family import Family, Rule, each, heads_in, linear, norm

BLOCK = "blocks.{i}"

FAMILY = Family(
    "timm ViT",
    each(
        [
            Rule("cls_token", "cls", "x x out"),
            Rule("reg_token", "registers", "x in out"),
            Rule("pos_embed", "pos", "x in out"),
            Rule("patch_embed.proj.weight", "embed", "out in in in"),
            Rule("patch_embed.proj.bias", "embed", "out"),
            Rule(f"{BLOCK}.attn.qkv.weight", "h.{i}.attn.*", "(q/k/v head dim) in"),
            Rule(f"{BLOCK}.attn.qkv.bias", "h.{i}.attn.*", "(q/k/v head dim)"),
            Rule(f"{BLOCK}.attn.q_bias", "h.{i}.attn.q", "(head dim)"),
            Rule(f"{BLOCK}.attn.v_bias", "h.{i}.attn.v", "(head dim)"),
            Rule(f"{BLOCK}.ls1.gamma", "h.{i}.scale1", "out"),
            Rule(f"{BLOCK}.ls2.gamma", "h.{i}.scale2", "out"),
        ],
        heads_in(f"{BLOCK}.attn.proj", "h.{i}.attn.o"),
        norm(f"{BLOCK}.attn.q_norm", "h.{i}.attn.q_norm"),
        norm(f"{BLOCK}.attn.k_norm", "h.{i}.attn.k_norm"),
        linear(f"{BLOCK}.mlp.fc1", "h.{i}.mlp.up"),
        linear(f"{BLOCK}.mlp.fc2", "h.{i}.mlp.down"),
        norm(f"{BLOCK}.norm1", "h.{i}.norm1"),
        norm(f"{BLOCK}.norm2", "h.{i}.norm2"),
        norm("patch_embed.norm", "embed_norm"),
        norm("norm_pre", "embed_norm"),
        norm("norm", "final_norm"),
        norm("fc_norm", "final_norm"),
        linear("head", "classifier"),
    ),
)
