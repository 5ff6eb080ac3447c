"""Every architecture that has a map, as a small problem; those of `cases` and some more."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cases import (
    CASES,
    ROTARY,
    TEXT,
    Case,
    hugging_face,
    labelled_rows,
    masked_text,
    padded_text,
    text,
    token_rows,
    tokens,
    vector_rows,
    vectors,
)
from curvlens import losses
from lookalikes import Fused, Lens, reference

BERT: dict[str, Any] = {
    **TEXT,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "max_position_embeddings": 8,
}


def masked(name: str, architecture: str, config: str, **settings: Any) -> Case:
    return Case(
        name,
        hugging_face(architecture, config, **{**BERT, **settings}),
        masked_text(7),
        losses.MaskedLM(),
        labelled_rows,
        hugging_face=True,
        fused=True,
    )


class Decoder(nn.Module):
    """``nn.Transformer``-like: encoder and decoder layers, cross-attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 10, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x, x.flip(1)))
        return y


class Separate(nn.Module):
    """``nn.MultiheadAttention`` with keys and values of other widths: three weights, one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + self.attention(x, x[..., :6], x[..., 2:6], need_weights=False)[0])
        return y


def like(name: str, make: Any) -> Case:
    return Case(name, make, tokens(20), losses.CausalLM(), token_rows)


EXPECTED: dict[str, str | None] = {
    "gpt2": "GPT-2",
    "gpt-neox": "GPT-NeoX",
    "llama": "Llama",
    "qwen3": "Llama",
    "gemma": "Llama",
    "gemma2": "Gemma",
    "mamba": "Mamba",
    "bert": "BERT",
    "vit": "ViT",
    "t5": "T5",
    "encoder-post": "torch.nn",
    "encoder-pre": "torch.nn",
    "multihead": "torch.nn",
    "gpt-pre": "reference GPT",
    "gpt-swiglu": "reference GPT",
    "gpt-tied": "reference GPT",
    "mistral": "Llama",
    "qwen2": "Llama",
    "gemma3": "Gemma",
    "phi3": "Phi-3",
    "mixtral": "Llama",
    "roberta": "BERT",
    "albert": "ALBERT",
    "transformer": "torch.nn",
    "multihead-separate": "torch.nn",
    "lens": "TransformerLens",
    "timm": "timm ViT",
    "neox-like": "GPT-NeoX",
}

MORE = [
    text("mistral", hugging_face("MistralForCausalLM", "MistralConfig", **ROTARY), padded_text(2), float32=True),
    text("qwen2", hugging_face("Qwen2ForCausalLM", "Qwen2Config", **ROTARY), padded_text(2), float32=True),
    text("gemma3", hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **ROTARY), padded_text(5), float32=True),
    text("phi3", hugging_face("Phi3ForCausalLM", "Phi3Config", **ROTARY), padded_text(5), float32=True),
    text(
        "mixtral",
        hugging_face(
            "MixtralForCausalLM",
            "MixtralConfig",
            **ROTARY,
            num_local_experts=3,
            num_experts_per_tok=2,
            experts_implementation="eager",
        ),
        padded_text(2),
        float32=True,
    ),
    masked("roberta", "RobertaForMaskedLM", "RobertaConfig"),
    masked("albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=4),
    Case("transformer", Decoder, vectors(11), losses.MSE(), vector_rows, square=True, fused=True),
    Case("multihead-separate", Separate, vectors(12, classes=3), losses.CrossEntropy(), vector_rows, fused=True),
    like("lens", lambda: Lens(reference())),
    like("timm", lambda: Fused(reference(), interleaved=False)),
    like("neox-like", lambda: Fused(reference(), interleaved=True)),
]

FAMILY_CASES = [case for case in (*CASES, *MORE) if case.name in EXPECTED]
assert len(FAMILY_CASES) == len(EXPECTED)
