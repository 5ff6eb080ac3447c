"""BERT and RoBERTa."""

from curvlens.blocks.family import Family, Rule, attention, each, embedding, linear, norm

HEADS = each(
    # After the layers, by model.
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


NAMES = "self.query self.key self.value output.dense"
LAYER = "layer.{i}"

FAMILY = Family(
    "BERT",
    each(
        EMBEDDINGS,
        attention(f"{LAYER}.attention", "h.{i}.attn", NAMES),
        norm(f"{LAYER}.attention.output.LayerNorm", "h.{i}.norm1"),
        attention(f"{LAYER}.crossattention", "h.{i}.cross", NAMES),
        norm(f"{LAYER}.crossattention.output.LayerNorm", "h.{i}.norm_cross"),
        linear(f"{LAYER}.intermediate.dense", "h.{i}.mlp.up"),
        linear(f"{LAYER}.output.dense", "h.{i}.mlp.down"),
        norm(f"{LAYER}.output.LayerNorm", "h.{i}.norm2"),
        HEADS,
    ),
    checked=("bert", "roberta"),
)
