"""The first paper's experiments, against independent truths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from curvlens.papers import setting
from curvlens.papers.draws import Draws, stream
from curvlens.papers.first_paper import bulk, entries, heads, step_sizes, tying, value_factors, value_functional
from curvlens.papers.first_paper.differentiated import flat_hessian, functional_part
from curvlens.papers.first_paper.layer import LENGTH, WIDTH
from curvlens.papers.learners import trained
from curvlens.papers.setting import hessian_at
from networks import close, gpt, product, set_weights


@pytest.mark.parametrize(("behind", "norm"), [("relu", "none"), ("pre relu", "pre")])
def test_the_differentiated_value_block_is_that_of_figure_3(behind: str, norm: Any) -> None:
    """Automatic differentiation against the closed form: in total, and in the part that Theorem 3.2 says is zero."""
    found = value_functional.measure({"width": 16, "behind": behind, "sigma": 0.3, "seed": 1})
    H = setting.block_hessian(16, sigma=0.3, seed=1, norm=norm)
    assert found["total"] == pytest.approx(H.norm("V", "total"), rel=1e-10)
    assert found["functional"] == pytest.approx(H.norm("V", "functional"), rel=1e-10)
    assert (found["functional"] == 0) == (norm == "none")


def test_the_value_block_bends_behind_a_gelu() -> None:
    """Against the reference GPT, assembled; about a third of the block, and with σ²."""
    task, width = Addition(), 16
    w = setting.weights(width, sigma=0.1, seed=1, task=task)
    model = gpt(width, 1, activation="gelu")
    set_weights(model, w)
    ids, labels = task.batch(setting.SEQUENCES, seed=1)
    truth = cl.assembly.read(model).hessian(ids, labels=labels, wrt=["h.0.attn.v.weight"])
    found = value_functional.measure({"width": width, "behind": "gelu", "sigma": 0.1, "seed": 1})
    assert found["functional"] == pytest.approx(truth.functional.norm(), rel=1e-9)
    assert found["total"] == pytest.approx(truth.total.norm(), rel=1e-9)
    assert 0.1 < found["functional"] / found["total"] < 1
    wide = {"width": 32, "sigma": 0.1, "seed": 1}
    assert value_functional.measure(wide | {"behind": "relu"})["functional"] == 0
    assert (
        value_functional.measure(wide | {"behind": "gelu"})["functional"] > 0
    )  # so that the zero is no matter of course


def test_entries_of_the_query_block_are_the_larger_ones_at_large_embeddings() -> None:
    for sigma, sign in ((0.2, 1), (2.0, -1)):
        medians = [
            entries.measure({"width": 16, "sigma": sigma, "kind": "softmax", "seed": seed})["median"]
            for seed in range(4)
        ]
        assert all(sign * (each["V"] - each["Q"]) > 0 for each in medians)


@pytest.mark.parametrize("value", heads.VALUES)
def test_heads_of_every_scale_are_exact(value: str) -> None:
    found = heads.measure({"heads": 2, "value": value, "seed": 0})
    assert found["apart"] < 1e-12
    assert found["between"] == 0


@pytest.mark.parametrize("variant", list(tying.VARIANTS))
def test_tied_blocks_are_those_of_a_tied_gpt(variant: str) -> None:
    """Norms of the query and the value block against the assembly of a whole GPT, whose weights are tied by torch."""
    width, task, tied = 4, Addition(), variant != "positions"
    w = tying.at(variant, width, sigma=0.5, seed=2)
    ids, labels = task.batch(3, seed=5)
    H = hessian_at(w, ids, labels)
    config = GPTConfig(
        vocab=12, context=17, n_layer=1, n_head=1, d_model=width, norm="none", activation="relu", bias=False, tied=tied
    )
    model = GPT(config).double()
    block: Any = model.h[0]
    linear = {block.attn.q: w.layer.q, block.attn.k: w.layer.k, block.attn.v: w.layer.v, block.attn.o: w.layer.o}
    linear |= {block.mlp.up: w.layer.up, block.mlp.down: w.layer.down, model.unembed: w.unembed}
    with torch.no_grad():
        for module, weight in linear.items():
            module.weight.copy_(weight.mT)
        model.embed.weight.copy_(w.embed)
        model.pos.weight.copy_(w.pos)
    truth = cl.assembly.read(model).hessian(ids, labels=labels)
    for letter in "QV":
        name = f"h.0.attn.{letter.lower()}.weight"
        for part, of in (("outer", "ggn"), ("functional", "functional"), ("total", "total")):
            expected = truth.norm(name, of)
            scale = 1e-13 * truth.norm(name)
            assert H.norm(letter, part) == pytest.approx(expected, rel=1e-10, abs=scale)  # type: ignore[arg-type]


def test_positions_are_as_large_as_weights_at_any_sigma() -> None:
    small, large = (tying.at("positions", 16, sigma=sigma, seed=0) for sigma in (0.01, 10.0))
    close(small.pos, large.pos)
    assert float(small.pos.std()) == pytest.approx(0.8 / 4, rel=0.1)
    close(large.embed, 1000 * small.embed)


def test_the_share_of_the_bulk_is_that_of_differentiated_matrices() -> None:
    """Both parts by automatic differentiation, and the share by the projector on the bulk instead of eigenvectors."""
    config = {"d_k": 3, "sigma": 0.8, "seed": 1}
    outer, functional = bulk.parts(config)
    own = Draws(1, "weights")
    length, width = LENGTH, WIDTH
    x, y = 0.8 * Draws(1, "tokens")(length, width), Draws(1, "targets")(length, width)
    q, k, v = (own(width, size, scale=width**-0.5) for size in (3, 3, width))

    def scores(a: Tensor, b: Tensor) -> Tensor:
        return x @ a @ b.mT @ x.mT / math.sqrt(3)

    def loss(t: Tensor) -> Tensor:
        return (t.softmax(-1) @ x @ v - y).square().mean()

    at = scores(q, k).requires_grad_()
    (held,) = torch.autograd.grad(loss(at), at)
    whole = flat_hessian(lambda a, b: loss(scores(a, b)), [q, k])
    through = flat_hessian(lambda a, b: (held * scores(a, b)).sum(), [q, k])
    close(functional, through)
    close(outer + functional, whole)
    values, vectors = torch.linalg.eigh(whole)
    kept = vectors[:, values.abs().argsort()[: int(bulk.BULK * len(values))]]
    projector = kept @ kept.mT
    expected = torch.trace(projector @ whole @ through) / torch.trace(projector @ whole @ whole)
    assert bulk.measure(config)["bulk"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("scaled", list(value_factors.SCALED))
def test_the_factors_of_a_value_are_differentiated(scaled: str) -> None:
    config = {"scaled": scaled, "target": 1.0, "size": 0.3, "seed": 4}
    x, q, k, (down, up), y, _ = value_factors.layer(config)
    plain = value_factors.layer(config | {"size": 1.0})
    attended = (x @ q @ k.mT @ x.mT / math.sqrt(q.shape[-1])).softmax(-1)
    close(attended, (plain[0] @ plain[1] @ plain[2].mT @ plain[0].mT / math.sqrt(q.shape[-1])).softmax(-1))
    close(attended @ x, (0.3 if scaled == "moment" else 1.0) * attended @ plain[0])

    def output(a: Tensor, b: Tensor) -> Tensor:
        return (attended @ x @ a @ b).sum(0)

    whole = flat_hessian(lambda a, b: (output(a, b) - y).square().mean(), [down, up])
    functional = functional_part(output, [down, up], y)
    outer, cut = whole - functional, down.numel()
    blocks = {"OO": outer[:cut, :cut], "UU": outer[cut:, cut:], "OU": outer[:cut, cut:]}
    found = value_factors.measure(config)
    for name, block in blocks.items():
        assert found["outer"][name] == pytest.approx(float(block.norm()), rel=1e-9)
    assert found["OU"] == pytest.approx(float(functional[:cut, cut:].norm()), rel=1e-9)


def test_the_hessian_of_the_step_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sizes, "SAMPLES", 2)
    H, places = step_sizes.network({"norm": "pre", "seed": 3})
    task = Addition(digits=2)
    model = trained(task, seed=stream(3, "weights"), steps=0, n_layer=2, n_head=2, d_model=8, norm="pre", bias=False)
    ids, labels = task.batch(2, seed=stream(3, "sequences"))
    names = [f"h.{n[0]}.{'attn' if len(n) == 2 else 'mlp'}.{n[1:]}.weight" for n in places]
    v = torch.randn(len(H), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(H @ v, product(model, ids, labels, [model.get_parameter(name) for name in names], v))


def test_rates_of_matrices_undo_the_sizes_of_blocks() -> None:
    """Blocks that differ in size alone: one rate a matrix leaves the condition of one, one for all does not help."""
    own = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    H = torch.kron(torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64)), own)
    places = {"0up": slice(0, 3), "0down": slice(3, 6)}
    found = {
        rate: step_sizes.condition(step_sizes.preconditioned(H, step_sizes.grouped(places, 6, rate)))
        for rate in ("one", "matrix", "parameter")
    }
    assert found["one"] == pytest.approx(step_sizes.condition(H))
    assert found["matrix"] == pytest.approx(step_sizes.condition(own))
    assert found["parameter"] == pytest.approx(1.0)


def test_heads_are_rows_of_the_query_and_columns_of_the_output() -> None:
    size = step_sizes.WIDTH**2
    groups = step_sizes.grouped({"0q": slice(0, size), "0o": slice(size, 2 * size)}, 2 * size, "head")
    q, o = groups.view(2, step_sizes.WIDTH, step_sizes.WIDTH)
    assert q[:, 0].tolist() == [0] * 4 + [1] * 4
    assert bool((q == q[:, :1]).all())
    assert o[0].tolist() == [2] * 4 + [3] * 4
    assert bool((o == o[:1]).all())
