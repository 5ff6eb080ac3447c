"""Small random models of five architectures go through an analysis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import curvlens as cl

models: Any = transformers
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
Made = tuple[torch.nn.Module, Any, Any]


def gpt2() -> Made:
    sizes: dict[str, Any] = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 8,
        "n_positions": 16,
        "vocab_size": 23,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return models.GPT2LMHeadModel(models.GPT2Config(**sizes)), {"input_ids": ids()}, cl.losses.CausalLM()


def llama() -> Made:
    more: dict[str, Any] = {"num_key_value_heads": 1, "vocab_size": 23, "max_position_embeddings": 16}
    model = models.LlamaForCausalLM(models.LlamaConfig(**SIZES, **more))
    return model, {"input_ids": ids()}, cl.losses.CausalLM()


def bert() -> Made:
    model = models.BertForMaskedLM(models.BertConfig(**SIZES, vocab_size=23))
    labels = ids().where(torch.arange(10) % 3 == 0, -100)
    return model, {"input_ids": ids(), "labels": labels}, cl.losses.MaskedLM()


def vit() -> Made:
    config = models.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    model = models.ViTForImageClassification(config)
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    return model, {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 0])}, cl.losses.CrossEntropy()


def t5() -> Made:
    sizes: dict[str, Any] = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 2,
    }
    config = models.T5Config(**sizes, vocab_size=23, decoder_start_token_id=0, pad_token_id=0)
    return models.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids(1)}, cl.losses.CausalLM()


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 23, (3, 10), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit, t5])
@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
def test_architectures(make: Callable[[], Made], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data, loss = make()
    problem = cl.Problem(model.double().eval(), data, loss)
    cl.analyze(problem, tmp_path / "run", "170 gradients")
    content = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert content["failed"] == []
    assert set(content["cells"]["G"]["trace"]) == set(problem.blocks)
    assert content["whole"]["H"]["top"]["value"] > 0
    assert content["sentences"]
    page = (tmp_path / "run" / "index.html").read_text()
    assert len(page) < 2 << 20
    for section in ("start", "heat", "spectrum", "eigenvectors", "origin", "depth", "attention", "stability", "noise"):
        assert f'<section id="{section}"' in page
