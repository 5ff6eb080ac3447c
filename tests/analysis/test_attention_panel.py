"""The attention panel: moments against matrices written out here, the last layer against dense derivatives."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from curvlens.analysis import attention, heads, moments
from curvlens.analysis.attention_theory import closed_form
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from subjects import adder, batch, problem, rows
from truth import Truth

models: Any = transformers


def gpt(**config: Any) -> Any:
    torch.manual_seed(1)
    task = Addition(digits=1)
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_mlp": 12, **config}
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, **sizes)).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.3)
            if ".attn." in name:
                p.mul_(2)
    return model


def asked(model: nn.Module) -> cl.Problem:
    return cl.Problem(model, batch(), cl.losses.CausalLM(shift=False))


def written_out(A: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M1, M2, M3 of one query token as a vector, a matrix and a tensor."""
    M1 = sum(a * x for a, x in zip(A, X, strict=True))
    M2 = sum(a * torch.outer(x - M1, x - M1) for a, x in zip(A, X, strict=True))
    M3 = sum(a * torch.einsum("a,b,c->abc", x - M1, x - M1, x - M1) for a, x in zip(A, X, strict=True))
    return M1, M2, M3


def test_moments_are_those_of_the_input_tokens() -> None:
    """Weights and tokens of a GPT, computed by hand."""
    model, (tokens, _) = gpt().requires_grad_(False), batch()
    found = attention.seen(asked(gpt()))["calls"]
    x = model.embed(tokens) + model.pos.weight[: tokens.shape[-1]]
    for number, layer in enumerate(model.h):
        assert found[number]["block"] == f"h.{number}.attn"
        X = layer.norm1(x)
        q, k = (f(X).view(*X.shape[:2], 2, 4).transpose(1, 2) for f in (layer.attn.q, layer.attn.k))
        scores = q @ k.transpose(-1, -2) / 2
        A = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1)
        for head in range(2):
            each = [written_out(A[b, head, i], X[b]) for b in range(len(X)) for i in range(X.shape[1])]
            for place, name in enumerate(("m1", "m2", "m3")):
                size = math.sqrt(sum(float(M[place].norm()) ** 2 for M in each) / len(each))
                assert found[number][name][head] == pytest.approx(size, rel=1e-10)
        x = layer(x)


def test_moments_of_many_tokens_come_from_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.rand(2, 3, 40, 40, generator=generator).double().tril()
    A = A / A.sum(-1, keepdim=True)
    X = torch.randn(2, 40, 5, generator=generator).double() + 3
    monkeypatch.setattr(moments, "ENTRIES", 16 * 40**2)
    monkeypatch.setattr(moments, "CHUNK", 3 * 40**2)
    found = moments.sizes(A, X)
    assert found["rows"] == 16
    places = [round(i * 79 / 15) for i in range(16)]
    each = [written_out(A[p // 40, 1, p % 40], X[p // 40]) for p in places]
    for place, name in enumerate(("m1", "m2", "m3")):
        size = math.sqrt(sum(float(M[place].norm()) ** 2 for M in each) / 16)
        assert found[name][1] == pytest.approx(size, rel=1e-10)  # type: ignore[index]


def test_tokens_first() -> None:
    """nn.MultiheadAttention with tokens before samples has the moments of the same model with samples first."""
    made, data = [], torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    for first in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=first).double()
        x = data.transpose(0, 1) if first else data
        made.append(cl.Problem(nn.Sequential(layer), (x, x), cl.losses.MSE()))
    one, other = (attention.seen(each)["calls"][0] for each in made)
    for name in ("m1", "m2", "m3"):
        assert one[name] == pytest.approx(other[name], rel=1e-10)
    ends = [closed_form(each, 8, 0)["trace"] for each in made]
    for role in "qkv":
        assert ends[0][role][0] == pytest.approx(ends[1][role][0], rel=1e-10)


def test_unknown_projections_have_no_moments() -> None:
    """Without names of blocks the weights are seen, and the page says why there are no moments."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(4, 12), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
            found: Tensor = self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
            return found

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    own = cl.Problem(Own().double(), (x, x[..., :1]), cl.losses.MSE())
    (call,) = attention.seen(own)["calls"]
    assert "m1" not in call
    assert call["why"] == attention.UNSEEN
    assert "no named blocks" in closed_form(own, 4, 0)["why"]["q"]


@cache
def dense(kind: str) -> tuple[cl.Problem, Tensor]:
    model = adder() if kind == "trained" else gpt(**KINDS[kind])
    return asked(model), Truth(model, [batch()], rows, square=False).ggn


KINDS: dict[str, dict[str, Any]] = {
    "trained": {},
    "biased": {},
    "one layer": {"n_layer": 1, "norm": "post"},
    "plain": {"n_layer": 1, "norm": "none", "d_mlp": 0, "attention_skip": False, "bias": False},
    "one head": {"n_head": 1, "norm_kind": "rms"},
}


def trace_of(matrix: Tensor, own: cl.Problem, name: str) -> float:
    places = torch.arange(own.layout.size, dtype=torch.float64)
    return float(matrix.diagonal()[own.blocks.split(places)[name].long()].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_against_dense_derivatives(kind: str) -> None:
    own, G = dense(kind)
    found = closed_form(own, 16, 0)
    assert found["why"] == {}
    for role in "qkv":
        value, stderr, _, dof, *_ = found["trace"][role]
        assert value == pytest.approx(trace_of(G, own, f"{found['block']}.{role}"), rel=1e-8)
        assert stderr == 0
        assert dof == math.inf


def test_sampled_roots_hold_the_truth() -> None:
    """With fewer samples than classes the closed form has an error, and keeps to it."""
    own, G = dense("biased")
    inside = 0
    for seed in range(12):
        found = closed_form(own, 8, seed)
        for role in "qkv":
            value, stderr, samples, dof, *_ = found["trace"][role]
            assert samples == 8
            assert dof == 7
            assert stderr > 0
            inside += abs(value - trace_of(G, own, f"h.1.attn.{role}")) < 2.365 * stderr
    assert inside >= 30  # of 36, of which 34 are expected


def test_batches_and_micro_batches() -> None:
    tokens, labels = batch()
    loss = cl.losses.CausalLM(shift=False)
    parts = [(tokens[:5], labels[:5]), (tokens[5:], labels[5:])]
    whole = closed_form(asked(gpt()), 16, 0)["trace"]
    for other in (cl.Problem(gpt(), parts, loss), cl.Problem(gpt(), batch(), loss, micro_batch=5)):
        for role, numbers in closed_form(other, 16, 0)["trace"].items():
            assert numbers[0] == pytest.approx(whole[role][0], rel=1e-10)
    own = asked(gpt())
    assert closed_form(own, 8, 3) == closed_form(own, 8, 3)
    assert closed_form(own, 8, 3) != closed_form(own, 8, 4)


def small(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, model = getattr(models, f"{kind}Config"), getattr(models, f"{kind}ForCausalLM")
    made: nn.Module = model(config(**sizes, vocab_size=13, max_position_embeddings=16, **more))
    return made.double().eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
def test_rotary_positions(implementation: str) -> None:
    """Queries and keys have a reason. Values have the closed form, also where heads share them."""
    model: Any = small("Llama", num_key_value_heads=1)
    model.set_attn_implementation(implementation)
    ids = torch.randint(1, 13, (3, 7), generator=torch.Generator().manual_seed(0))
    own = cl.Problem(model, {"input_ids": ids}, cl.losses.CausalLM())
    found = closed_form(own, 16, 0)
    assert set(found["why"]) == {"q", "k"}
    assert "rotary" in found["why"]["q"]

    def shifted(net: nn.Module, given: Any) -> tuple[Tensor, Tensor]:
        logits = net(input_ids=given).logits
        return logits[:, :-1].flatten(0, 1), given[:, 1:].flatten()

    G = Truth(model, [ids], shifted, square=False).ggn
    assert found["trace"]["v"][0] == pytest.approx(trace_of(G, own, "h.1.attn.v"), rel=1e-8)
    shown = heads.beside(found, {})
    assert "theory" not in shown["rows"]["q"]
    assert shown["rows"]["q"]["why"] == found["why"]["q"]


def test_pooled_outputs_have_a_reason() -> None:
    torch.manual_seed(0)
    config = models.BertConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=13, num_labels=3
    )
    model = models.BertForSequenceClassification(config).double().eval()
    ids = torch.randint(1, 13, (4, 6), generator=torch.Generator().manual_seed(0))
    own = cl.Problem(model, {"input_ids": ids, "labels": torch.tensor([0, 1, 2, 0])}, cl.losses.CrossEntropy())
    found = closed_form(own, 16, 0)
    assert found["trace"] == {}
    assert "pooled" in found["why"]["v"]
    assert "(4, 3)" in found["why"]["v"]


class Mixed(nn.Module):
    """A GPT whose logits are the mean of those of all tokens so far: tokens meet behind the last attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens).cumsum(1)
        return logits


def test_tokens_that_meet_again_have_a_reason() -> None:
    found = closed_form(asked(Mixed()), 16, 0)
    assert found["trace"] == {}
    assert found["why"]["q"].startswith("Tokens meet again")


def test_parameters_that_were_left_out() -> None:
    """Without the biases of the queries the scores are not those of the chosen parameters."""
    model = gpt()
    names = [name for name, _ in model.named_parameters() if not name.endswith("q.bias")]
    own = cl.Problem(model, batch(), cl.losses.CausalLM(shift=False), names)
    found = closed_form(own, 16, 0)
    assert set(found["trace"]) == {"v"}
    assert "not among the chosen ones" in found["why"]["k"]


def test_linear_attention_has_a_reason() -> None:
    assert closed_form(asked(gpt(attention="linear")), 16, 0)["why"]["q"] == "No softmax attention was seen."


def test_the_model_is_left_as_it_was() -> None:
    own = problem()
    before = {name: (id(p), p.requires_grad, p.grad, p.clone()) for name, p in own.model.named_parameters()}
    drawn = torch.get_rng_state()
    closed_form(own, 8, 0)
    attention.seen(own)
    for name, p in own.model.named_parameters():
        place, wants, gradient, value = before[name]
        assert id(p) == place
        assert p.requires_grad == wants
        assert p.grad is gradient
        assert torch.equal(p, value)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.overrides._len_torch_function_stack() == 0  # type: ignore[attr-defined]


def cell(value: float) -> dict[str, Any]:
    return {"value": value, "stderr": 0.1}


def test_ranks() -> None:
    """Equal orders, opposite ones, and none below six heads."""
    rows = [{"m1": float(i), "m2": float(i), "q": cell(i**3), "k": cell(-i), "v": cell(i * 7 % 8)} for i in range(8)]
    found = {each["role"]: each for each in heads.ranks(rows)}
    assert found["q"]["correlation"] == pytest.approx(1)
    assert found["k"]["correlation"] == pytest.approx(-1)
    assert found["q"]["p"] < 1e-3
    # ranks 0 7 6 5 4 3 2 1 against 0 to 7: 1 − 6 Σd²/(n(n² − 1))
    assert found["v"]["correlation"] == pytest.approx(1 - 6 * (36 + 16 + 4 + 0 + 4 + 16 + 36) / (8 * 63))
    assert found["v"]["p"] > 0.3
    assert heads.ranks(rows[:5]) == []
    assert [each["role"] for each in heads.ranks([{**row, "k": cell(1.0)} for row in rows])] == ["q", "v"]
    assert [each["role"] for each in heads.ranks([{"m2": row["m2"], "q": row["q"]} for row in rows])] == ["q"]


def test_heads_of_a_group_share_keys() -> None:
    call = {"block": "h.0.attn", "sink": [0.1, 0.2, 0.3, 0.4], "evenness": [1.0] * 4}
    traces = {f"h.0.attn.q.{i}": cell(i) for i in range(4)} | {f"h.0.attn.k.{i}": cell(10 + i) for i in range(2)}
    found = heads.by_head([call], traces)
    assert [row["q"]["value"] for row in found] == [0, 1, 2, 3]
    assert [row["k"]["value"] for row in found] == [10, 10, 11, 11]
    assert "v" not in found[0]


def test_no_unit_is_taken_twice() -> None:
    """A coarse and a fine round ask for some of the same units. Counted twice, their errors would be too small."""
    from curvlens.analysis.plan import Imagined
    from curvlens.analysis.schedule import schedule
    from curvlens.analysis.subject import outline

    of = outline(problem(), has_ggn=True, optimizer=None, seed=0, budget=2000.0, minimal=False)
    known = Imagined(of)
    keys = []
    for step in schedule(of, known):
        keys.append(step.unit.key)
        known.cost += step.cost
    assert len(keys) > 50
    assert len(set(keys)) == len(keys)


def test_the_page(tmp_path: Path) -> None:
    """JSON and page have heads beside their curvature, ranks, and theory beside the measured traces."""
    model = gpt(n_layer=3)
    own = asked(model)
    found = cl.analyze(own, tmp_path / "run", "420 gradients")
    content = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert content["failed"] == []
    G = Truth(model, [batch()], rows, square=False).ggn
    by_head = own.blocks.by("head")
    places = torch.arange(own.layout.size, dtype=torch.float64)
    assert len(content["attention_heads"]) == 6
    inside = 0
    for row in content["attention_heads"]:
        for role in "qkv":
            true = G.diagonal()[by_head.split(places)[f"{row['block']}.{role}.{row['head']}"].long()].sum()
            inside += row[role]["low"] <= float(true) <= row[role]["high"]
    assert inside >= 14  # of 18 that are correlated: q, k, v of a head are measured by the same probes
    assert {each["role"] for each in content["attention_ranks"]} == set("qkv")
    theory = content["attention_theory"]
    assert theory["block"] == "h.2.attn"
    for role, row in theory["rows"].items():
        assert row["theory"]["exact"]
        assert row["theory"]["value"] == pytest.approx(trace_of(G, own, f"h.2.attn.{role}"), rel=1e-8)
        assert row["measured"] == content["cells"]["G"]["trace"][f"h.2.attn.{role}"]
        gap = abs(row["theory"]["value"] - row["measured"]["value"])
        assert row["apart"] == pytest.approx(gap / row["measured"]["stderr"])
    page = re.sub(r"<[^>]*>", " ", found.page.read_text())
    assert "The last attention layer, h.2.attn" in page
    assert "Rank correlations over 6 heads" in page
    assert "does not apply" not in page
