"""One list of cases for every operator: small random models with their batches and losses, all in float64.

Each case also says, in plain torch, what its outputs and targets are; nothing of that uses curvlens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from curvlens import losses
from curvlens.models import GPT, GPTConfig

Batch = Any
Rows = tuple[Tensor, Tensor]
"""The outputs that count in a batch, (rows, classes), and what they are compared with."""

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its batches and its loss; ``rows`` is the plain forward pass of one batch."""

    name: str
    make: Callable[[], nn.Module]
    batches: Sequence[Batch]
    loss: losses.Loss
    rows: Callable[[nn.Module, Batch], Rows]
    square: bool = False
    """Whether the loss is the square error; cross-entropy otherwise."""
    hugging_face: bool = False
    float32: bool = False
    """Whether the model has steps that are done in float32 whatever its dtype."""
    fused: bool = False
    """Whether its attention is a fused kernel, which cannot be differentiated twice."""
    relu: bool = False
    seed: int = 0

    def model(self) -> nn.Module:
        """A new copy of the model, always the same one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.make()
            randomise(model)
        return model.double().eval()

    def __repr__(self) -> str:
        return self.name


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights of scale 1/√fan-in, biases and norms well away from 0 and 1, so that no row of the Hessian is trivial."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape)
        if p.ndim < 2:
            p.add_(0.3 * noise)
        elif name.endswith("A_log"):  # Mamba's decay rates: log(1), log(2), … is where they belong
            p.add_(0.1 * noise)
        else:
            p.copy_(noise / math.sqrt(p[0].numel()))


# Batches. Every text case has two, of different lengths and with different numbers of valid tokens.

VOCABULARY = 7


def integers(shape: tuple[int, ...], high: int, seed: int) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def normals(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_text(seed: int) -> list[Batch]:
    """Tokens alone, in batches of two and one samples."""
    return [{"input_ids": integers((2, 5), VOCABULARY, seed)}, {"input_ids": integers((1, 4), VOCABULARY, seed + 1)}]


def padded_text(seed: int) -> list[Batch]:
    """One batch padded and without labels, one with labels of its own, of which some are ignored."""
    first, second = plain_text(seed)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = second["input_ids"].clone()
    labels[0, 1] = IGNORED
    return [{**first, "attention_mask": mask}, {**second, "attention_mask": torch.ones(1, 4).long(), "labels": labels}]


def left_padded_text(seed: int) -> list[Batch]:
    """As generation pads: on the left, so that some queries have no key they may look at."""
    first, second = padded_text(seed)
    return [{**first, "attention_mask": first["attention_mask"].flip(1)}, second]


def masked_text(seed: int) -> list[Batch]:
    """Padded tokens, and labels at a few of them only."""
    batches = []
    for text, hidden in zip(plain_text(seed), ([[1, 3], [0, 2]], [[2]]), strict=True):
        tokens = text["input_ids"]
        labels = torch.full_like(tokens, IGNORED)
        labels.scatter_(1, torch.tensor(hidden), tokens.gather(1, torch.tensor(hidden)))
        mask = torch.ones_like(tokens)
        mask[-1, 3:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def translations(seed: int) -> list[Batch]:
    """Source with padding, target with ignored labels at its end."""
    batches = padded_text(seed)
    for i, batch in enumerate(batches):
        batch["labels"] = integers((len(batch["input_ids"]), 3), VOCABULARY, seed + 7 + i)
    batches[0]["labels"][0, 2:] = IGNORED
    return batches


def images(seed: int) -> list[Batch]:
    """Two by two patches of two by two pixels."""
    return [
        {"pixel_values": normals((n, 1, 4, 4), seed + n), "labels": integers((n,), 4, seed + n) - 1} for n in (3, 2)
    ]


def tokens(seed: int) -> list[Batch]:
    """For models called with a tensor: tokens alone, and tokens with labels of which some are ignored."""
    first, second = (batch["input_ids"] for batch in plain_text(seed))
    labels = first.clone()
    labels[1, 3:] = IGNORED
    return [(first, labels), second]


def tokens_and_vectors(seed: int, width: int = VOCABULARY) -> list[Batch]:
    """Tokens, and a vector to hit at every position."""
    texts = (batch["input_ids"] for batch in plain_text(seed))
    return [(text, normals((*text.shape, width), seed + i)) for i, text in enumerate(texts)]


def vectors(seed: int, classes: int = 0, width: int = 8) -> list[Batch]:
    """Sequences of vectors; the target is a label at every position, some ignored, or a vector."""
    batches = []
    for n in (2, 1):
        x = normals((n, 4, width), seed + n)
        y = integers((n, 4), classes + 1, seed + n) - 1 if classes else normals((n, 4, 3), seed + n + 10)
        if classes:
            y[0, 1] = IGNORED
        batches.append((x, y))
    return batches


# The plain forward pass of a batch: which outputs count, and their targets


def causal_labels(batch: Batch) -> Tensor:
    """The labels as Hugging Face wants them: given, or the tokens, without padding and what it would predict."""
    if "labels" in batch:
        return batch["labels"]  # type: ignore[no-any-return]
    labels: Tensor = batch["input_ids"].clone()
    for row, there in enumerate(batch.get("attention_mask", torch.ones_like(labels)).tolist()):
        for place, real in enumerate(there):
            if not real or (place and not there[place - 1]):
                labels[row, place] = IGNORED
    return labels


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def causal_rows(model: nn.Module, batch: Batch) -> Rows:
    logits = model(**inputs_of(batch)).logits
    return logits[:, :-1].flatten(0, 1), causal_labels(batch)[:, 1:].flatten()


def token_rows(model: nn.Module, batch: Batch) -> Rows:
    """Tokens, or tokens with labels; the token that follows is what counts."""
    tokens, labels = batch if isinstance(batch, tuple) else (batch, batch)
    return model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def labelled_rows(model: nn.Module, batch: Batch) -> Rows:
    logits = model(**inputs_of(batch)).logits
    return logits.flatten(0, -2), batch["labels"].flatten()


def translation_rows(model: nn.Module, batch: Batch) -> Rows:
    labels = batch["labels"]
    start = torch.zeros_like(labels[:, :1])
    decoder = torch.cat([start, labels[:, :-1].clamp(min=0)], dim=1)
    logits = model(**inputs_of(batch), decoder_input_ids=decoder).logits
    return logits.flatten(0, 1), labels.flatten()


def vector_rows(model: nn.Module, batch: Batch) -> Rows:
    x, y = batch
    return model(x).flatten(0, 1), y.flatten(0, 1)


# Models

TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
ROTARY: dict[str, Any] = {
    **TEXT,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 5,
}


def hugging_face(architecture: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """The factory of a model from a configuration, its attention implementation left at the default."""

    def make() -> nn.Module:
        model = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        assert isinstance(model, nn.Module)
        return model

    return make


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` as users write it: batch first, in front of a linear layer."""

    def __init__(self, n_layer: int, *, norm_first: bool, activation: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 10, activation=activation, batch_first=True, norm_first=norm_first, dropout=0.1
        )
        self.body = nn.TransformerEncoder(layer, n_layer, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = x[..., 0] > 0.5  # a rule for each sample by itself, so that batches can be cut
        y: Tensor = self.head(self.body(x, src_key_padding_mask=padding))
        return y


class Attention(nn.Module):
    """``nn.MultiheadAttention`` that does not return its weights, so that torch takes the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y: Tensor = self.head(x + self.attention(h, h, h, attn_mask=causal, need_weights=False)[0])
        return y


def text(name: str, make: Callable[[], nn.Module], batches: list[Batch], **more: Any) -> Case:
    return Case(name, make, batches, losses.CausalLM(), causal_rows, hugging_face=True, **more)


def gpt(name: str, *, square: bool = False, seed: int = 0, **variant: Any) -> Case:
    """A variant of the reference GPT."""
    sizes: dict[str, Any] = {"vocab": VOCABULARY, "context": 5, "n_layer": 1, "n_head": 2, "d_model": 6, "d_mlp": 7}
    config = GPTConfig(**{**sizes, **variant})
    return Case(
        f"gpt-{name}",
        lambda: GPT(config),
        tokens_and_vectors(20) if square else tokens(20),
        losses.MSE() if square else losses.CausalLM(),
        vector_rows if square else token_rows,
        square=square,
        fused=config.attention == "softmax",
        relu=config.activation == "relu",
        seed=seed,
    )


CASES: list[Case] = [
    text(
        "gpt2",
        hugging_face("GPT2LMHeadModel", "GPT2Config", **TEXT, n_embd=8, n_layer=2, n_head=2, n_inner=10, n_positions=5),
        padded_text(0),
        fused=True,
    ),
    text(
        "gpt-neox",
        hugging_face(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            **TEXT,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=10,
            rotary_pct=1.0,
            max_position_embeddings=5,
        ),
        plain_text(1),
        fused=True,
    ),
    text(
        "llama",
        hugging_face("LlamaForCausalLM", "LlamaConfig", **ROTARY),
        left_padded_text(2),
        float32=True,
        fused=True,
    ),
    text("qwen3", hugging_face("Qwen3ForCausalLM", "Qwen3Config", **ROTARY), padded_text(3), float32=True, fused=True),
    text("gemma", hugging_face("GemmaForCausalLM", "GemmaConfig", **ROTARY), plain_text(4), float32=True, fused=True),
    text("gemma2", hugging_face("Gemma2ForCausalLM", "Gemma2Config", **ROTARY), padded_text(5), float32=True),
    text(
        "mamba",
        hugging_face(
            "MambaForCausalLM", "MambaConfig", **TEXT, hidden_size=6, state_size=3, num_hidden_layers=1, expand=2
        ),
        plain_text(6),
        float32=True,
    ),
    Case(
        "bert",
        hugging_face(
            "BertForMaskedLM",
            "BertConfig",
            **TEXT,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=10,
            max_position_embeddings=5,
        ),
        masked_text(7),
        losses.MaskedLM(),
        labelled_rows,
        hugging_face=True,
        fused=True,
    ),
    Case(
        "vit",
        hugging_face(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=10,
            image_size=4,
            patch_size=2,
            num_channels=1,
            num_labels=3,
        ),
        images(8),
        losses.CrossEntropy(),
        labelled_rows,
        hugging_face=True,
        fused=True,
    ),
    Case(
        "t5",
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            **TEXT,
            d_model=8,
            d_kv=4,
            d_ff=10,
            num_layers=1,
            num_heads=2,
            relative_attention_num_buckets=6,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        ),
        translations(9),
        losses.CausalLM(),
        translation_rows,
        float32=True,
        hugging_face=True,
    ),
    Case(
        "encoder-post",
        lambda: Encoder(1, norm_first=False, activation="relu"),
        vectors(10, classes=3),
        losses.CrossEntropy(),
        vector_rows,
        fused=True,
        relu=True,
    ),
    Case(
        "encoder-pre",
        lambda: Encoder(2, norm_first=True, activation="gelu"),
        vectors(11),
        losses.MSE(),
        vector_rows,
        square=True,
        fused=True,
    ),
    Case("multihead", Attention, vectors(12, classes=3), losses.CrossEntropy(), vector_rows, fused=True),
    gpt("pre", n_layer=2),
    gpt("post", norm="post", n_layer=2),
    gpt("none", norm="none", n_layer=2),
    gpt("rms", norm_kind="rms", n_layer=2),
    gpt("linear", attention="linear", n_layer=2),
    gpt("relu", activation="relu"),
    gpt("gelu-tanh", activation="gelu_tanh"),
    gpt("silu", activation="silu"),
    gpt("swiglu", activation="swiglu"),
    gpt("tied", tied=True, n_layer=2),
    gpt("no-bias", bias=False),
    gpt("no-skip", attention_skip=False),
    gpt("no-mlp", d_mlp=0, n_layer=2),
    gpt("square", square=True),
    gpt(
        "post-rms-swiglu-tied-no-bias",
        norm="post",
        norm_kind="rms",
        activation="swiglu",
        tied=True,
        bias=False,
        n_layer=2,
    ),
    gpt("rms-linear-silu-tied", norm_kind="rms", attention="linear", activation="silu", tied=True, n_layer=2),
    gpt("post-linear-relu-square", norm="post", attention="linear", activation="relu", square=True),
    gpt(
        "all-linear-square", norm="none", attention="linear", activation="identity", bias=False, square=True, n_layer=2
    ),
]
