"""The reference GPT of this package. Its parameters have the names of the blocks."""

from curvlens.blocks.family import Family, attention, each, embedding, linear, norm

FAMILY = Family(
    "reference GPT",
    each(
        attention("h.{i}.attn", "h.{i}.attn", "q k v o"),
        *(linear(f"h.{{i}}.mlp.{role}", f"h.{{i}}.mlp.{role}") for role in ("up", "gate", "down")),
        norm("h.{i}.norm1", "h.{i}.norm1"),
        norm("h.{i}.norm2", "h.{i}.norm2"),
        embedding("embed", "embed"),
        embedding("pos", "pos"),
        norm("final_norm", "final_norm"),
        linear("unembed", "unembed"),
    ),
)
