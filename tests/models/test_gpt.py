"""The reference model, its data, and the demonstration of both."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from curvlens import CurvlensError
from curvlens.cli import app
from curvlens.data import Addition, Characters
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


def test_addition_adds() -> None:
    task = Addition()
    tokens, labels = task.batch(64, seed=3)
    assert tokens.shape == labels.shape == (64, 17) == (64, task.context)
    assert ((labels != -100).sum(1) == 6).all()
    for row, label in zip(tokens, labels, strict=True):
        line = task.text(torch.cat([row, label[-1:]]))
        found = re.fullmatch(r"(\d{5})\+(\d{5})=(\d{6})", line)
        assert found
        assert int(found[1]) + int(found[2]) == int(found[3])
        assert (label[11:16] == row[12:]).all()
    assert torch.equal(task.batch(4, seed=1)[0], task.batch(4, seed=1)[0])
    assert not torch.equal(task.batch(4, seed=1)[0], task.batch(4, seed=2)[0])


def test_characters() -> None:
    corpus = Characters()
    assert len(corpus.stream) > 100_000
    assert 0 <= int(corpus.stream.min()) <= int(corpus.stream.max()) < corpus.vocab
    batch = corpus.batch(4, 50, seed=0)
    assert batch.shape == (4, 50)
    assert torch.equal(batch, corpus.batch(4, 50, seed=0))
    whole = corpus.text(corpus.stream)
    assert corpus.text(batch[2]) in whole
    assert "class ArgumentParser" in whole
    with pytest.raises(CurvlensError, match="characters of the corpus"):
        corpus.batch(1, 10**9, seed=0)
    with pytest.raises(CurvlensError, match=r"no file nothing\.py"):
        _ = Characters(("nothing.py",)).stream


def test_demo() -> None:
    """Short of training; the tables are complete, and H = G + F where the logits are linear."""
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--sequences", "1", "--samples", "4"])
    assert result.exit_code == 0, result.output
    assert "loss" in result.output
    assert "the same samples, so the errors in its columns are correlated" in " ".join(result.output.split())
    rows = re.findall(r"│ (\S+) +│ +(\S+)[^│]*│ +(\S+)[^│]*│ +(\S+)[^│]*│", result.output)
    rows = [row for row in rows if row[0] not in "HGF"]
    names = [row[0] for row in rows]
    assert len(names) == 3 * 20
    assert names[:20] == names[20:40] == names[40:]
    for name, _, g, f in rows:
        assert math.isfinite(float(g))
        if name in ("unembed", "final_norm"):
            assert float(f) == 0  # the logits are linear in each of these
