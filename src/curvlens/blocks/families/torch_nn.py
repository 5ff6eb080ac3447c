"""``torch.nn``: Transformer, its encoders, decoders and layers, MultiheadAttention fused or separate."""

from __future__ import annotations

from curvlens.blocks.family import Family, Rule, each, heads_in, linear, norm


def multihead(path: str, block: str) -> tuple[Rule, ...]:
    """``nn.MultiheadAttention``; the biases of q, k, v are in one tensor also where the weights are separate."""
    dot = f"{path}." if path else ""
    return each(
        [
            Rule(f"{dot}in_proj_weight", f"{block}.*", "(q/k/v head dim) in"),
            Rule(f"{dot}in_proj_bias", f"{block}.*", "(q/k/v head dim)"),
            *(Rule(f"{dot}{role}_proj_weight", f"{block}.{role}", "(head dim) in") for role in "qkv"),
            *(Rule(f"{dot}bias_{role}", f"{block}.{role}", "x x (head dim)") for role in "kv"),
        ],
        heads_in(f"{dot}out_proj", f"{block}.o"),
    )


def layer(path: str, block: str) -> tuple[Rule, ...]:
    """An encoder or decoder layer."""
    return each(
        multihead(f"{path}self_attn", f"{block}.attn"),
        multihead(f"{path}multihead_attn", f"{block}.cross"),
        linear(f"{path}linear1", f"{block}.mlp.up"),
        linear(f"{path}linear2", f"{block}.mlp.down"),
        *(norm(f"{path}norm{j}", f"{block}.norm{j}") for j in (1, 2, 3)),
    )


FAMILY = Family(
    "torch.nn",
    each(
        layer("encoder.layers.{i}.", "enc.{i}"),
        layer("decoder.layers.{i}.", "dec.{i}"),
        norm("encoder.norm", "enc.final_norm"),
        norm("decoder.norm", "dec.final_norm"),
        layer("{i}.", "h.{i}"),
        layer("", "h.0"),
        multihead("{i}.{any}", "h.{i}.attn"),
        multihead("", "attn"),
        norm("norm", "final_norm"),
    ),
)
