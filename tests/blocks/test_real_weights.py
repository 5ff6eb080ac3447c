"""Trained models by block, with a check beside each that the model understands its input."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from real import reaction_bert, sentence_encoder

pytestmark = pytest.mark.full

MODELS: dict[str, tuple[Any, Any, int]] = {
    "reactions": (reaction_bert, cl.losses.MaskedLM(), 12),
    "sentences": (sentence_encoder, cl.losses.Contrastive(), 6),
}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def loaded(name: str) -> tuple[nn.Module, dict[str, Tensor], cl.Problem]:
    make, loss, _ = MODELS[name]
    model, batch = make()
    return model, batch, cl.Problem(model.double(), batch, loss)


def shuffled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same words in another order, mask tokens and padding at their places."""
    generator = torch.Generator().manual_seed(0)
    result = dict(batch)
    for key in ("input_ids", "left", "right"):
        if key in batch:
            tokens = batch[key].clone()
            for row in tokens:
                free = (row > 14).nonzero()[:, 0] if key == "input_ids" else (row > 102).nonzero()[:, 0]
                row[free] = row[free[torch.randperm(len(free), generator=generator)]]
            result[key] = tokens
    return result


def test_reactions_are_understood() -> None:
    model, batch, problem = loaded("reactions")
    wrong = cl.Problem(model, shuffled(batch), cl.losses.MaskedLM())
    assert problem.loss() < 1
    assert wrong.loss() > 3 * problem.loss()


def test_sentences_are_understood() -> None:
    model, batch, problem = loaded("sentences")
    turned = {key: value.roll(1, 0) if key.startswith("right") else value for key, value in batch.items()}
    assert problem.loss() < 0.1
    assert cl.Problem(model, turned, cl.losses.Contrastive()).loss() > 3


@every_model
def test_map(name: str) -> None:
    _, _, problem = loaded(name)
    assert problem.blocks.family == "BERT"
    assert not problem.blocks.unmapped
    layers = MODELS[name][2]
    assert [f"h.{i}.attn.q" in problem.blocks for i in range(layers)] == [True] * layers
    v = small.direction(problem.layout.size)
    assert torch.equal(problem.blocks.join(problem.blocks.split(v)), v)


@every_model
def test_blocks(name: str) -> None:
    """Traces of all blocks add up; the largest eigenvalue of a block is no larger than that of the whole."""
    _, _, problem = loaded(name)
    G, H = cl.ggn(problem), cl.hessian(problem)
    traces = cl.trace(G, 24, by="block")
    whole = cl.trace(G, 24)
    total = sum(float(t) for t in traces.values())
    error = sum(float(t.stderr) for t in traces.values()) + float(whole.stderr)
    assert abs(total - float(whole)) <= 4 * error
    top = cl.eigs(G, 1, tol=1e-2)
    for block in ("h.0.attn.q", f"h.{MODELS[name][2] - 1}.mlp.down"):
        assert 0 < float(cl.eigs(G[block], 1, tol=1e-2).values[0]) <= 1.01 * float(top.values[0])
    # A product with one head, against a difference of gradients.
    head = "h.1.attn.k.2"
    v = problem.blocks.by("head").join({head: small.direction(problem.blocks.by("head")[head].size)})
    step = 1e-4 / float(v.norm())
    ahead, behind = (problem.with_params(problem.theta + s * step * v).gradient() for s in (1, -1))
    difference = problem.blocks.by("head").split((ahead - behind) / (2 * step))[head]
    product = H[head] @ problem.blocks.by("head").split(v)[head]
    assert small.relative(product, difference) < 1e-5
