"""Losses of texts: padding, batches without samples, labels, ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import curvlens as cl
from small import direction, relative


def text_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=23, max_position_embeddings=16, **sizes)
    make: Any = transformers.LlamaForCausalLM
    return make(config).double().eval()


def test_padding_on_the_left_changes_nothing() -> None:
    """The first token of a text is predicted from nothing, with padding before it or without."""
    model = text_model()
    ids = torch.randint(3, 23, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = cl.Problem(model, batch, cl.losses.CausalLM())
    alone = [{"input_ids": row[there == 1][None]} for row, there in zip(ids, mask, strict=True)]
    apart = cl.Problem(model, alone, cl.losses.CausalLM())
    assert padded.n_tokens == apart.n_tokens == 10
    v = direction(padded.layout.size)
    assert padded.loss() == pytest.approx(apart.loss(), rel=1e-13)
    assert relative(cl.hessian(padded) @ v, cl.hessian(apart) @ v) < 1e-12
    labelled = {**batch, "labels": ids.where(mask != 0, -100)}  # as given: Hugging Face counts all of these
    theirs = cl.Problem(model, labelled, cl.losses.CausalLM())
    assert theirs.n_tokens == 12
    assert theirs.loss() == pytest.approx(float(model(**labelled).loss), rel=1e-6)
    assert "counted-padding" in {finding.name for finding in cl.doctor(theirs)}
    assert "counted-padding" not in {finding.name for finding in cl.doctor(padded)}


def test_a_first_batch_without_samples() -> None:
    model = text_model()
    ids = torch.randint(3, 23, (2, 5), generator=torch.Generator().manual_seed(1))
    whole = cl.Problem(model, {"input_ids": ids}, cl.losses.CausalLM())
    begun = cl.Problem(model, [{"input_ids": ids[:0]}, {"input_ids": ids}], cl.losses.CausalLM())
    assert begun.loss() == pytest.approx(whole.loss(), rel=1e-14)
    with pytest.raises(cl.CurvlensError, match="No token of the data counts"):
        cl.Problem(model, {"input_ids": ids[:0]}, cl.losses.CausalLM()).loss()


def test_labels_at_the_last_token_alone_are_not_shifted() -> None:
    model = text_model()
    ids = torch.randint(3, 23, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(ids, -100)
    labels[:, -1] = torch.tensor([1, 2, 0])
    batch = {"input_ids": ids, "labels": labels}
    assert cl.Problem(model, batch, cl.losses.CausalLM()).loss() == pytest.approx(float(model(**batch).loss), rel=1e-6)


def test_ids_beyond_the_vocabulary_are_told() -> None:
    with pytest.raises(cl.CurvlensError, match="a token id is outside the vocabulary"):
        cl.Problem(text_model(), {"input_ids": torch.full((1, 4), 40)}, cl.losses.CausalLM())
