"""Whether names mean what they say: layouts that only look alike, ties, parts of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from cases import hugging_face
from curvlens.blocks import map_blocks
from lookalikes import NanoGPT

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize("width", [6, 8])  # 3 divides the one, and not the other
def test_nanogpt_is_cut_as_linear_layers_are(width: int) -> None:
    torch.manual_seed(0)
    model = NanoGPT(width).double().eval()
    ids = torch.randint(7, (3, 5))
    problem = cl.Problem(model, {"input_ids": ids}, cl.losses.CausalLM())
    assert not list(cl.doctor(problem))
    parameters = dict(model.named_parameters())
    weight, bias = (parameters[f"transformer.h.0.attn.c_attn.{name}"] for name in ("weight", "bias"))
    logits = model(ids)[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [weight, bias], create_graph=True)
    for i, role in enumerate("qkv"):
        rows = slice(i * width, (i + 1) * width)

        def taken(pair: Any, rows: slice = rows) -> Tensor:
            return torch.cat([pair[0][rows].reshape(-1), pair[1][rows]])

        truth = torch.stack(
            [taken(torch.autograd.grad(x, [weight, bias], retain_graph=True)) for x in taken(gradients)]
        )
        block = cl.hessian(problem)[f"h.0.attn.{role}"].dense()
        torch.testing.assert_close(block, truth, rtol=1e-10, atol=1e-14)
        assert problem.blocks[f"h.0.attn.{role}"].n_heads == 2
    for name, module in (("up", "c_fc"), ("down", "c_proj")):
        block_of = problem.blocks[f"h.0.mlp.{name}"]
        stored = parameters[f"transformer.h.0.mlp.{module}.weight"]
        mathematical = block_of.to_math(problem.blocks.split(problem.theta)[f"h.0.mlp.{name}"])
        torch.testing.assert_close(mathematical[: stored.numel()].view(stored.T.shape), stored.detach().T)


@pytest.mark.parametrize("multi_query", [True, False])
def test_gpt_bigcode_is_no_gpt2(multi_query: bool) -> None:
    config = transformers.GPTBigCodeConfig(
        vocab_size=20, n_positions=16, n_embd=24, n_layer=1, n_head=4, multi_query=multi_query
    )
    make: Any = transformers.GPTBigCodeForCausalLM
    assert map_blocks(make(config)).family is None


def test_mamba_2_is_no_mamba() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 4,
        "expand": 2,
        "n_groups": 1,
    }
    config = transformers.Mamba2Config(vocab_size=20, num_hidden_layers=1, **sizes)
    make: Any = transformers.Mamba2ForCausalLM
    assert map_blocks(make(config)).family is None


@pytest.mark.parametrize("kind", ["GptOss", "Qwen3Next"])
def test_other_layouts_under_the_names_of_llama_are_left_alone(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "GptOss": {"head_dim": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
        "Qwen3Next": {
            "head_dim": 8,
            "layer_types": ["full_attention"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "decoder_sparse_step": 1,
        },
    }
    model = hugging_face(f"{kind}ForCausalLM", f"{kind}Config", **{**SIZES, **options[kind]})()
    assert map_blocks(model).family is None


def test_heads_that_do_not_fit_the_number_the_model_tells_are_not_cut() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=False) for n in (16, 8, 8))
            self.o_proj = nn.Linear(8, 8, bias=False)
            self.head_dim, self.num_heads = 4, 2  # q_proj holds a gate beside every query

    model, layer = nn.Module(), nn.Module()
    layer.self_attn = Attention()
    model.layers = nn.ModuleList([layer])
    blocks = map_blocks(model)
    assert "h.0.attn.q" not in blocks
    assert blocks["h.0.attn.o"].n_heads == 2
    assert blocks.unmapped == ("layers.0.self_attn.q_proj.weight",)


def test_the_family_is_that_of_the_whole_model() -> None:
    model = hugging_face("Gemma2ForCausalLM", "Gemma2Config", **SIZES, head_dim=6)()
    whole = map_blocks(model)
    some = [name for name, _ in model.named_parameters() if "self_attn" in name or "post_attention" in name]
    part = map_blocks(model, some)
    assert part.family == whole.family == "Gemma"
    assert part["h.0.norm1_post"].parameters == whole["h.0.norm1_post"].parameters
    assert "h.0.norm2" not in part
    assert map_blocks(model, ["model.embed_tokens.weight"])["embed"].size == whole["embed"].size


def towers() -> nn.Module:
    both = nn.Module()
    make: Any = transformers.GPT2LMHeadModel
    for name in ("teacher", "student"):
        config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=6, n_layer=1, n_head=2)
        both.add_module(name, make(config))
    return both


def test_aliases_of_towers_say_which() -> None:
    blocks = map_blocks(towers())
    assert "unembed" not in blocks
    assert blocks["student.unembed"].parameters == ("student.transformer.wte.weight",)


def test_what_is_left_of_a_block_whose_weight_is_tied_is_called_so() -> None:
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=6, n_layer=2, n_head=2)
    make: Any = transformers.GPT2LMHeadModel
    model = make(config)
    first, second = model.transformer.h
    second.attn.c_attn.weight = first.attn.c_attn.weight
    second.mlp.c_fc.weight = first.mlp.c_fc.weight
    blocks = map_blocks(model)
    for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
        assert f"h.1.{name}" not in blocks
        assert f"h.1.{name}.bias" in blocks
        assert f"h.0.{name}" in blocks


def test_a_parametrised_fused_weight_leaves_a_bias() -> None:
    model: Any = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    nn.utils.parametrizations.weight_norm(model[0].self_attn, "in_proj_weight")
    blocks = map_blocks(model)
    assert "h.0.attn.qkv" in blocks
    assert "h.0.attn.q" not in blocks
    assert "h.0.attn.q.bias" in blocks


def test_traces_of_half_precision_do_not_underflow() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).half()
    x, y = 3e-4 * torch.randn(8, 4), torch.randint(3, (8,))
    with pytest.warns(cl.CurvlensWarning):
        half = cl.Problem(model, (x.half(), y), cl.losses.CrossEntropy())
    exact = cl.Problem(nn.Linear(4, 3, bias=False).double(), (x.half().double(), y), cl.losses.CrossEntropy())
    with torch.no_grad():
        next(iter(exact.model.parameters())).copy_(model.weight.double())
    exact = cl.Problem(exact.model, (x.half().double(), y), cl.losses.CrossEntropy())
    truth = float(cl.ggn(exact).dense().trace())
    with pytest.warns(cl.CurvlensWarning, match="float16"):
        estimate = cl.trace(cl.ggn(half), 200, by="parameter")["weight"]
    assert abs(float(estimate) - truth) < 0.1 * truth


def test_blocks_of_few_outputs_are_not_closed_too_early() -> None:
    """Two samples of one output: a sample takes one of two values, and some are equal by chance."""
    x = torch.tensor([[1.0, 2, 3], [1.1, 2, 2.5]]).double()
    model = nn.Linear(3, 1).double()
    G = cl.ggn(cl.Problem(model, (x, torch.zeros(2, 1).double()), cl.losses.MSE()))
    truth = float(G["weight"].dense().trace())
    estimates = [cl.trace(G, by="parameter", rtol=0.2, seed=seed)["weight"] for seed in range(100)]
    covered = sum(low <= truth <= high for low, high in (e.interval(0.95) for e in estimates))
    assert covered >= 92
    assert all(e.samples >= 16 and abs(float(e) - truth) < 0.7 * truth for e in estimates)


@pytest.mark.parametrize("blocks", [{"a": 3}, {"a": None}, {1: "0.*"}])
def test_groups_that_are_no_names_are_refused(blocks: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).double()
    data = (torch.ones(1, 2).double(), torch.ones(1, 2).double())
    with pytest.raises(cl.CurvlensError, match="expected a text as the name of a block"):
        cl.Problem(model, data, cl.losses.MSE(), blocks=blocks)
