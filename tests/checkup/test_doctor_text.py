"""What the doctor finds in texts: padding, labels, positions, and tokens that a model does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from cases import hugging_face
from curvlens.checkup import doctor
from families import FAMILY_CASES
from sick import TOKENS
from small import gpt, relative
from test_doctor import BY_NAME, CE, Encoder, only, only_names, padded, product

CAUSAL = cl.losses.CausalLM


def test_padding_that_the_embedding_knows() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 2, 1, 0, 0]])
    batch = tokens, torch.tensor([1, 2])  # a label for each sample: nothing else says what is padding

    class Mean(Encoder):
        def forward(self, tokens: Tensor) -> Tensor:
            y = super().forward(tokens)
            kept = (tokens != 0).unsqueeze(-1)
            return (y * kept).sum(1) / kept.sum(1)

    blind, seeing = (Mean(masking=masking).double().eval() for masking in (False, True))
    for model in (blind, seeing):
        model.embed.padding_idx = 0
    finding = only(doctor(blind, batch, CE()), "unmasked-padding", "error")
    assert "(the padding_idx of its embedding) and is not masked: 2 tokens in samples 1" in finding.what
    assert "src_key_padding_mask" in finding.fix
    assert finding.size is not None
    assert finding.size > 1e-3
    assert relative(product(blind, batch), product(seeing, batch)) > 0.01
    assert only_names(doctor(seeing, batch, CE())) == set()
    # Taking padding_idx away, which mends missing rows, leaves the padding in the attention.
    blind.embed.padding_idx = None
    assert relative(product(blind, batch), product(seeing, batch)) > 0.01


def test_the_fix_of_counted_padding_names_what_the_batch_lacks() -> None:
    model, bare = padded("gpt2", mask=False)
    finding = only(doctor(model, bare, CAUSAL()), "counted-padding", "error")
    assert "attention_mask" in finding.fix
    assert "labels" not in finding.fix
    fixed = {"batch": dict(bare)}
    exec(finding.fix, fixed)
    assert list(doctor(model, fixed["batch"], CAUSAL())) == []


def eos_padded() -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT-2 without a token for padding, whose second sample ends in three tokens that end a text."""
    model = BY_NAME["gpt2"].model()
    model.config.pad_token_id, model.config.eos_token_id = None, 6  # type: ignore[union-attr]
    return model, {"input_ids": torch.tensor([[1, 2, 3, 4, 5], [3, 2, 6, 6, 6]])}


def test_runs_of_the_end_of_text() -> None:
    model, bare = eos_padded()
    finding = only(doctor(model, bare, CAUSAL()), "eos-padding", "note")
    assert "2 tokens in samples 1" in finding.what
    masked = {**bare, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
    wrong, right = (cl.Problem(model, batch, CAUSAL()).loss() for batch in (bare, masked))
    assert finding.size == pytest.approx(abs(wrong - right) / right)
    assert relative(product(model, bare, CAUSAL()), product(model, masked, CAUSAL())) > 0.05
    assert list(doctor(model, masked, CAUSAL())) == []
    all_counts = {**bare, "attention_mask": torch.ones(2, 5).long()}  # somebody says that they are text
    assert list(doctor(model, all_counts, CAUSAL())) == []
    one_end = {"input_ids": torch.tensor([[1, 2, 3, 4, 6], [3, 2, 6, 5, 6]])}
    assert list(doctor(model, one_end, CAUSAL())) == []


# Labels


@pytest.mark.parametrize("loss", [CE(), CAUSAL(shift=False)], ids=repr)
def test_unshifted_labels(loss: cl.losses.Loss) -> None:
    data = (TOKENS, TOKENS.clone())
    finding = only(doctor(gpt(), data, loss), "unshifted-labels", "error")
    wrong, right = (cl.Problem(gpt(), data, used).loss() for used in (loss, CAUSAL()))
    assert finding.size == pytest.approx(abs(wrong - right) / right)
    assert relative(product(gpt(), data, loss), product(gpt(), data, CAUSAL())) > 0.05
    assert list(doctor(gpt(), data, CAUSAL())) == []
    shifted = torch.cat([TOKENS[:, 1:], torch.full_like(TOKENS[:, :1], -100)], dim=1)
    assert list(doctor(gpt(), (TOKENS, shifted), loss)) == []
    assert relative(product(gpt(), (TOKENS, shifted), loss), product(gpt(), data, CAUSAL())) < 1e-12


def test_unshifted_labels_of_hugging_face() -> None:
    model, tokens = BY_NAME["gpt2"].model(), torch.tensor([[1, 2, 3, 4, 5], [3, 2, 5, 4, 1]])
    report = doctor(model, {"input_ids": tokens, "labels": tokens}, cl.losses.MaskedLM())
    only(report, "unshifted-labels", "error")


def test_a_model_that_sees_everything_may_be_asked_for_what_it_sees() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 2, 5, 4, 1]])
    assert only_names(doctor(Encoder(masking=False).double().eval(), (tokens, tokens), CE())) == set()


# Positions


def left_padded(mask: Tensor) -> dict[str, Tensor]:
    """Padding before the second text; its first token is not asked for, since what stands before it is padding."""
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 6, 3, 2, 1]])
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.cumsum(1) > 1, tokens, -100)}


def test_positions_that_count_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    model, bare = BY_NAME["gpt2"].model(), left_padded(mask)
    right = {**bare, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    finding = only(doctor(model, bare, CAUSAL()), "padded-positions", "error")
    assert "Samples 1 of" in finding.what
    alone = {"input_ids": bare["input_ids"][1:, 2:]}
    rows = [{key: x[1:] for key, x in batch.items()} for batch in (bare, right)]
    wrong, mended, true = (cl.Problem(model, batch, CAUSAL()).loss() for batch in (*rows, alone))
    assert abs(wrong - true) > 1e-3 * true
    assert abs(mended - true) < 1e-12 * true
    whole = [cl.Problem(model, batch, CAUSAL()).loss() for batch in (bare, right)]
    assert finding.size == pytest.approx(abs(whole[0] - whole[1]) / whole[1])
    assert relative(product(model, bare, CAUSAL()), product(model, right, CAUSAL())) > 1e-3
    assert list(doctor(model, right, CAUSAL())) == []


@pytest.mark.parametrize("name", ["llama", "roberta", "t5"])
def test_positions_that_do_not_count_padding(name: str) -> None:
    """Rotary positions are relative, RoBERTa counts its tokens, T5 takes no positions."""
    case = next(case for case in FAMILY_CASES if case.name == name)
    batch = dict(case.batches[0])
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    pad = getattr(case.model().config, "pad_token_id", None)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0 if pad is None else pad)
    batch.pop("labels", None) if name == "llama" else None
    assert "padded-positions" not in only_names(doctor(case.model(), batch, case.loss))


# What a model does not have


def small_gpt2() -> Any:
    return BY_NAME["gpt2"].model()


def bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return hugging_face("BertForMaskedLM", "BertConfig", vocab_size=7, max_position_embeddings=4, **sizes)().eval()


def mixtral(**options: Any) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    configure: Any = transformers.MixtralConfig
    make: Any = transformers.MixtralForCausalLM
    config = configure(vocab_size=7, num_key_value_heads=1, num_local_experts=2, **sizes)
    return make._from_config(config, **options).double().eval()


def text(length: int, highest: int = 6) -> dict[str, Tensor]:
    tokens = torch.arange(2 * length).view(2, length) % (highest + 1)
    return {"input_ids": tokens, "labels": tokens}


REFUSALS = {
    "vocabulary": (small_gpt2, text(5, highest=8), CAUSAL(), "ids run from 0 to 8, but 'transformer.wte' has 7 rows"),
    "positions": (small_gpt2, text(6), CAUSAL(), "6 tokens are longer than the 5 positions of 'transformer.wpe'"),
    "bert": (bert, text(6), cl.losses.MaskedLM(), "6 tokens are longer than the 4 positions"),
    "translation": (lambda: BY_NAME["t5"].model(), text(5), CE(), "the model is an encoder-decoder"),
    "experts": (mixtral, text(5), CAUSAL(), "has no float64"),
}
FIXES = {"vocabulary": "resize_token", "positions": "[:, :5]", "bert": "[:, :4]", "translation": "CausalLM()"}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_their_cause(name: str) -> None:
    make, data, loss, cause = REFUSALS[name]
    finding = only(doctor(make(), data, loss), "refused", "error")
    assert cause in finding.what
    assert FIXES.get(name, "") in finding.fix
    error = RuntimeError if name == "bert" else cl.CurvlensError  # torch's own words say the sizes
    with pytest.raises(error, match=r".+"):
        cl.Problem(make(), data, loss)


def test_the_fixes_of_refusals() -> None:
    assert list(doctor(small_gpt2(), text(5), CAUSAL())) == []
    assert "experts_implementation='eager'" in doctor(mixtral(), text(5), CAUSAL())[0].fix
    assert only_names(doctor(mixtral(experts_implementation="eager"), text(5), CAUSAL())) == set()
    assert "refused" not in only_names(doctor(BY_NAME["t5"].model(), text(5), CAUSAL()))


def test_a_classifier_that_finds_the_end_by_the_padding_uses_its_mask() -> None:
    """With a decoder the last token of a text is found by the ids of its padding: no business of the mask."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 1, "num_labels": 3}
    config = transformers.LlamaConfig(vocab_size=23, num_attention_heads=2, pad_token_id=0, **sizes)
    make: Any = transformers.LlamaForSequenceClassification
    model = make(config).double().eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    ids = torch.randint(3, 23, (3, 6)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}
    assert not [finding.name for finding in cl.doctor(model, batch, cl.losses.CrossEntropy())]
