"""BERT and RoBERTa, ALBERT (which uses one layer many times), and the older layout of ViT."""

from curvlens.blocks.family import Family, Rule, each, embedding, heads_in, heads_out, linear, norm

HEADS = each(
    # What stands behind the layers, by model.
    [Rule("predictions.bias", "unembed", "out")],
    linear("predictions.decoder", "unembed"),
    linear("predictions.transform.dense", "unembed_dense"),
    norm("predictions.transform.LayerNorm", "unembed_norm"),
    linear("predictions.dense", "unembed_dense"),
    norm("predictions.LayerNorm", "unembed_norm"),
    [Rule("lm_head.bias", "unembed", "out")],
    linear("lm_head.decoder", "unembed"),
    linear("lm_head.dense", "unembed_dense"),
    norm("lm_head.layer_norm", "unembed_norm"),
    linear("cls.seq_relationship", "next_sentence"),
    linear("pooler.dense", "pooler"),
    linear("pooler", "pooler"),
    linear("classifier.dense", "classifier_dense"),
    linear("classifier.out_proj", "classifier"),
    linear("classifier", "classifier"),
    linear("qa_outputs", "classifier"),
)

EMBEDDINGS = each(
    embedding("embeddings.word_embeddings", "embed"),
    embedding("embeddings.position_embeddings", "pos"),
    embedding("embeddings.token_type_embeddings", "embed_type"),
    norm("embeddings.LayerNorm", "embed_norm"),
    linear("embedding_hidden_mapping_in", "embed_map"),
)


def layer(path: str) -> tuple[Rule, ...]:
    """A layer of BERT."""
    return each(
        *(
            heads_out(f"{path}.attention.self.{name}", f"h.{{i}}.attn.{role}")
            for role, name in {"q": "query", "k": "key", "v": "value"}.items()
        ),
        heads_in(f"{path}.attention.output.dense", "h.{i}.attn.o"),
        norm(f"{path}.attention.output.LayerNorm", "h.{i}.norm1"),
        *(
            heads_out(f"{path}.crossattention.self.{name}", f"h.{{i}}.cross.{role}")
            for role, name in {"q": "query", "k": "key", "v": "value"}.items()
        ),
        heads_in(f"{path}.crossattention.output.dense", "h.{i}.cross.o"),
        norm(f"{path}.crossattention.output.LayerNorm", "h.{i}.norm_cross"),
        linear(f"{path}.intermediate.dense", "h.{i}.mlp.up"),
        linear(f"{path}.output.dense", "h.{i}.mlp.down"),
        norm(f"{path}.output.LayerNorm", "h.{i}.norm2"),
    )


FAMILY = Family("BERT", each(EMBEDDINGS, layer("layer.{i}"), HEADS))
