"""The reference model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from curvlens.models import GPT, GPTConfig


@pytest.mark.parametrize(
    ("norm", "attention", "activation"),
    list(
        itertools.product(
            ["pre", "post", "none"], ["softmax", "linear"], ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "identity"]
        )
    ),
)
def test_every_variant_is_causal(norm: str, attention: str, activation: str) -> None:
    """What comes later does not change what was said before; and every parameter matters."""
    torch.manual_seed(0)
    config = GPTConfig(vocab=5, context=7, d_model=8, norm=norm, attention=attention, activation=activation)  # type: ignore[arg-type]
    model = GPT(config)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    changed = tokens.clone()
    changed[0, 4:] = 2
    torch.testing.assert_close(model(tokens)[:, :4], model(changed)[:, :4])
    assert (model(tokens)[:, 4:] - model(changed)[:, 4:]).abs().max() > 1e-3
    gradients = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        key_bias = name.endswith("k.bias") and attention == "softmax"  # softmax does not see it
        assert key_bias or g.abs().max() > 1e-8, name
        assert p.shape == g.shape


def test_options() -> None:
    assert not [n for n, _ in GPT(GPTConfig(vocab=5, context=4, bias=False)).named_parameters() if "bias" in n]
    tied = GPT(GPTConfig(vocab=5, context=4, tied=True))
    assert tied.unembed.weight is tied.embed.weight
    rms = GPT(GPTConfig(vocab=5, context=4, norm_kind="rms"))
    assert [m for m in rms.modules() if isinstance(m, nn.RMSNorm)]
    assert not [m for m in rms.modules() if isinstance(m, nn.LayerNorm)]
    bare = GPT(GPTConfig(vocab=5, context=4, d_mlp=0, norm="none", attention_skip=False))
    assert not [n for n, _ in bare.named_parameters() if "mlp" in n or "norm" in n]
    assert "n_layer=2" in repr(bare)


def test_initialisation_has_the_stated_deviations() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=50, context=400, d_model=64)).requires_grad_(False)
    assert float(model.get_parameter("h.0.attn.q.weight").std()) == pytest.approx(0.8 / 8, rel=0.05)
    assert float(model.get_parameter("h.0.mlp.down.weight").std()) == pytest.approx(0.8 / 16, rel=0.05)
    model.initialise(embed_std=0.2)
    assert float(model.pos.weight.std()) == pytest.approx(0.2, rel=0.05)
