"""Whole models with tiled attention: products with H as with every score written out, unchanged and by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from cases import CASES, Case, randomise
from curvlens.operators import ggn, hessian
from curvlens.sdpa import attention, huggingface, kernels, mode, tiles
from families import MORE

FUSED = [case for case in (*CASES, *MORE) if case.fused]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tiles whatever the length, of a few scores each; and which kernels ran."""
    monkeypatch.setattr(attention, "SHORT", -1)
    monkeypatch.setattr(tiles, "NUMBERS", 8)
    monkeypatch.setattr(tiles, "FEWEST", 2)
    monkeypatch.setattr(tiles, "MOST_THREADS", 1)
    seen: list[str] = []
    for name in ("attend", "pull", "bend"):
        plain = getattr(kernels, name)

        def watched(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            seen.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(kernels, name, watched)
    return seen


def products(problem: cl.Problem) -> list[Tensor]:
    v = torch.linspace(-1, 1, problem.layout.size, dtype=torch.float64).cos()
    return [hessian(problem) @ v, ggn(problem) @ v]


def eager(case: Case) -> nn.Module:
    """The model with its attention written out by its authors, or by torch."""
    model: Any = case.model()
    if case.hugging_face:
        model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


def sees_something(batch: Any) -> Any:
    """Without padding in front: a query there sees nothing and gets 0 from torch, and a mean of all from eager code."""
    if isinstance(batch, dict) and "attention_mask" in batch and not batch["attention_mask"][:, 0].all():
        return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    return batch


@pytest.mark.parametrize("case", FUSED, ids=repr)
def test_unchanged_models(case: Case, calls: list[str]) -> None:
    """GPT-2, Llama with grouped heads, BERT with padding, ViT, torch's encoder and all others that call torch's."""
    batches = [sees_something(batch) for batch in case.batches]
    tiled = products(cl.Problem(case.model(), batches, case.loss))
    assert {"attend", "pull", "bend"} <= set(calls)
    calls.clear()
    attention.SHORT = 10**9  # the fixture puts it back
    for found, truth in zip(tiled, products(cl.Problem(eager(case), batches, case.loss)), strict=True):
        assert (found - truth).norm() <= 1e-9 * truth.norm()
    assert not calls


def small(name: str, **settings: Any) -> Any:
    made = getattr(transformers, f"{name}Config")
    common = {
        "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 10, "head_dim": 4, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "d_model": 8, "d_ff": 10, "num_layers": 2, "num_heads": 4, "d_kv": 4,
    }  # fmt: skip
    return made(**{**common, **settings})


NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Gemma2": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 4, "sliding_window": 4}),
    "GptOss": ("GptOssForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 8, "n_head": 2, "n_layer": 2}),
    "T5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
}


@pytest.mark.parametrize("name", NAMED)
def test_by_name(name: str, calls: list[str]) -> None:
    """Soft caps, sinks, windows, learned biases: a product with H of the logits' squares, as with eager attention."""
    architecture, settings = NAMED[name]
    torch.manual_seed(0)
    model: Any = getattr(transformers, architecture)._from_config(small(name, **settings))
    randomise(model)
    model = model.double().eval()
    if name == "GptOss":
        model.set_experts_implementation("eager")  # the other has no float64
    batch: dict[str, Tensor] = {"input_ids": torch.tensor([[3, 4, 5, 6, 1, 2, 3], [1, 5, 3, 2, 0, 0, 0]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    if name == "T5":
        batch["decoder_input_ids"] = batch["input_ids"][:, :5]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def second(implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        with cl.keep_dtype(model):
            out = model(**batch).logits.square().sum()
            gradient = torch.autograd.grad(out, parameters, create_graph=True, allow_unused=True)
            total = torch.stack([(g * g.detach().cos()).sum() for g in gradient if g is not None]).sum()
            parts = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    truth = second("eager")
    assert not calls
    found = second(cl.sdpa.register())
    assert "bend" in calls
    assert (found - truth).norm() <= 1e-9 * truth.norm()


def test_what_the_named_attention_does_not_know() -> None:
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(cl.CurvlensError, match=r"passes the argument 'block_table'.*'eager'"):
        huggingface.attention(nn.Identity(), q, q, q, None, block_table=q)
    with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
        huggingface.attention(nn.Identity(), q, q, q, None, dropout=0.1)


def test_another_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with ours is compared with that of the model as it is, once."""
    case = next(case for case in FUSED if repr(case) == "gpt2")
    plain = attention.scaled_dot_product_attention
    monkeypatch.setattr(mode, "scaled_dot_product_attention", lambda *args, **kwargs: 1.01 * plain(*args, **kwargs))
    problem = cl.Problem(case.model(), case.batches, case.loss)
    with pytest.raises(cl.CurvlensError, match="they are not the same function"):
        products(problem)
