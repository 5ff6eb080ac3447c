"""Networks read from modules: the same outputs, and the Hessian of the operators, in names, order and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import curvlens as cl
from cases import randomise
from curvlens import CurvlensError, assembly
from curvlens.operators.modules import recordings_of
from small import gpt, relative, tokens_and_labels

GPTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post, rms, swiglu": {"norm": "post", "norm_kind": "rms", "activation": "swiglu"},
    "none, relu, no bias": {"norm": "none", "activation": "relu", "bias": False},
    "tied": {"tied": True, "activation": "gelu_tanh", "n_head": 1},
    "attention alone": {"d_mlp": 0, "attention_skip": False},
    "linear attention": {"attention": "linear", "activation": "identity"},
}


def check(H: assembly.NetworkHessian, problem: cl.Problem) -> None:
    """Total and Gauss–Newton part agree with the operators, and so do names and order."""
    assert H.names == tuple(problem.layout.names)
    hessian, ggn = cl.hessian(problem).dense(), cl.ggn(problem).dense()
    assert relative(H.total.dense(), hessian) < 1e-10
    assert relative(H.ggn.dense(), ggn) < 1e-10
    assert relative(H.ggn.dense() + sum(part.dense() for part in H.parts.values()), hessian) < 1e-10
    v = torch.randn(H.size, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative(H.matvec(v), hessian @ v) < 1e-10


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
def test_the_reference_model(options: dict[str, Any]) -> None:
    model = gpt(**options)
    tokens, labels = tokens_and_labels(3, length=5)
    network = assembly.read(model)
    assert relative(network.forward(tokens), model(tokens).detach()) < 1e-14
    H = network.hessian(tokens, labels=labels)
    check(H, cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy()))
    modules = dict(model.named_modules())
    for name in H.parts:
        last = name.rpartition(".")[2]
        assert name in modules or last in {"scores", "softmax", "mix", "activation", "gating"}, name


def gpt2(**options: Any) -> Any:
    sizes = {"vocab_size": 7, "n_positions": 5, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 6}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **dropout, **options}))  # type: ignore[no-untyped-call]
    randomise(model)
    return model.double().eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {
                "n_layer": 2,
                "tie_word_embeddings": False,
                "activation_function": "relu",
                "scale_attn_by_inverse_layer_idx": True,
            },
            marks=pytest.mark.full,
        ),
    ],
    ids=["tied", "untied"],
)
def test_gpt2(options: dict[str, Any]) -> None:
    model = gpt2(**options)
    tokens, labels = tokens_and_labels(2, length=4, seed=1)
    network = assembly.read(model)
    assert relative(network.forward(tokens), model(tokens).logits.detach()) < 1e-14
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    shifted[0, 0] = 3
    labels[0, 1] = 3
    H = network.hessian(tokens, labels=shifted)
    problem = cl.Problem(model, {"input_ids": tokens, "labels": labels}, cl.losses.CausalLM())
    check(H, problem)
    assert "transformer.h.0.ln_1" in H.parts
    assert "transformer.h.0.attn.c_attn" in H.parts
    assert "transformer.h.0.attn.softmax" in H.parts
    assert "transformer.h.0.mlp.act" in H.parts
    assert "lm_head" in H.parts


def test_gpt2_without_its_head() -> None:
    model = gpt2(attn_implementation="eager").transformer
    tokens, _ = tokens_and_labels(2, length=4, seed=1)
    target = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = assembly.read(model)
    assert relative(network.forward(tokens), model(tokens).last_hidden_state.detach()) < 1e-14
    H = network.hessian(tokens, target=target)
    assert H.names == tuple(dict(model.named_parameters()))
    names = list(H.names)

    def loss(*values: Tensor) -> Tensor:
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,)).last_hidden_state
        return F.mse_loss(out, target)

    truth = torch.autograd.functional.hessian(loss, tuple(model.get_parameter(n).detach() for n in names))  # type: ignore[no-untyped-call]
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            right = truth[i][j].reshape(H.total[a, b].shape)
            assert float((H.total[a, b] - right).norm()) <= 1e-10 * float(right.norm()) + 1e-12


ENCODERS: dict[str, dict[str, Any]] = {
    "post, relu": {},
    "pre, gelu": {"norm_first": True, "activation": "gelu"},
    "no bias": {"bias": False, "activation": nn.SiLU()},
}


@pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("layers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_the_encoder_of_torch(options: dict[str, Any], layers: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **options)
    model: nn.Module = layer
    if layers:
        model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(4), enable_nested_tensor=False)
    randomise(model)
    model.double().eval()
    x, y = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (1, 2))
    network = assembly.read(model)
    with torch.no_grad():
        assert relative(network.forward(x), model(x)) < 1e-14
        causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        options = {"mask": causal} if layers else {"src_mask": causal}
        assert relative(assembly.read(model, mask="causal").forward(x), model(x, **options)) < 1e-14
    check(network.hessian(x, target=y), cl.Problem(model, (x, y), cl.losses.MSE()))


def test_inputs_and_tables() -> None:
    model = gpt()
    tokens, labels = tokens_and_labels(2)
    network = assembly.read(model)
    embedded = (model.embed(tokens) + model.pos.weight).detach()
    by_tokens = network.hessian(tokens, labels=labels, wrt=["h.0.attn.q.weight", "X"]).total
    by_states = network.hessian(embedded, labels=labels, wrt=["h.0.attn.q.weight", "X"]).total
    assert by_tokens.names == ("h.0.attn.q.weight", "X")
    assert torch.equal(by_tokens.dense(), by_states.dense())
    whole = network.hessian(embedded, labels=labels, wrt=["embed.weight", "X"]).total
    assert whole.norm("embed.weight") == 0  # X was given: the table moves nothing
    with pytest.raises(CurvlensError, match="is made of"):
        network.hessian(tokens, labels=labels, wrt=["embed.weight", "X"])


def test_a_gpt_takes_no_mask() -> None:
    for model, name in ((gpt(), "GPT"), (gpt2(), "GPT2LMHeadModel"), (gpt2().transformer, "GPT2Model")):
        for mask in ("causal", torch.ones(3, 3, dtype=torch.bool)):
            with pytest.raises(CurvlensError, match=f"a {name} brings its own causal mask: leave mask= out"):
                assembly.read(model, mask=mask)


OWN = {"self_attn": ("self_attn.in_proj", "self_attn.out_proj"), "": ("activation",)}
"""Rows of a profile that hold several parts of an encoder layer, or one under another name."""


@pytest.mark.parametrize("activation", [F.gelu, nn.GELU()], ids=["function", "module"])
def test_parts_have_the_names_of_the_profile(activation: Any) -> None:
    """Every part is a row of the profile; what torch computes outside of a module is the own code of the one around."""
    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation=activation).double().eval()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, _ = tokens_and_labels(2, length=4, seed=1)
    model = gpt2().transformer
    target = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = cl.losses.FromOutputs(lambda out, batch: (F.mse_loss(out, target, reduction="sum"), 32))
    for module, data, loss, given, own in (
        (encoder, (x, x.flip(0)), cl.losses.MSE(), {"target": x.flip(0)}, OWN),
        (model, {"input_ids": tokens}, last, {"target": target}, {}),
    ):
        problem = cl.Problem(module, data, loss)
        closed = assembly.read(module).hessian(x if module is encoder else tokens, **given)
        z = torch.randn(problem.layout.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (recording,) = recordings_of(problem)
        table, _ = recording.forms([problem.layout.unflatten(z)], 1)
        size, seen = abs(float(z @ closed.matvec(z))), set()
        for path, forms in table.items():
            hidden = [name for name in own.get(path, ()) if name not in table]
            inner = [name for name in closed.parts if name in (path, *hidden)]
            truth = sum(float(z @ closed.matvec(z, name)) for name in inner)
            assert abs(float(forms) / recording.count - truth) < 1e-10 * size, path
            seen |= set(inner)
        assert seen == set(closed.parts)


class Renamed(nn.TransformerEncoderLayer):
    pass


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(CurvlensError, match="Renamed is not known; known are GPT"):
        assembly.read(Renamed(4, 2, 6, batch_first=True))
    with pytest.raises(CurvlensError, match=r"call \.eval\(\)"):
        assembly.read(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True))
    with pytest.raises(CurvlensError, match="batch_first=True"):
        assembly.read(nn.TransformerEncoderLayer(4, 2, 6).eval())
    with pytest.raises(CurvlensError, match="The activation is"):
        assembly.read(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation=F.elu).eval())
    with pytest.raises(CurvlensError, match=r"mask is torch\.float32"):
        assembly.read(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).eval(), mask=torch.zeros(2, 2))
    changed = gpt()
    changed.h[0].attn.q = nn.Sequential(nn.Linear(4, 4)).double()  # type: ignore[union-attr]
    with pytest.raises(CurvlensError, match=r"'h\.0\.attn\.q' is a Sequential"):
        assembly.read(changed)
    parametrised = gpt()
    nn.utils.parametrizations.weight_norm(parametrised.unembed)
    with pytest.raises(CurvlensError, match=r"ParametrizedLinear|computed from others"):
        assembly.read(parametrised)
