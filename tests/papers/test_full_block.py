"""Tying, the bulk, values of low rank, couplings and step sizes: what is measured, against independent truths."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from curvlens.calculus import norms
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from curvlens.papers.draws import Draws, stream
from curvlens.papers.first_paper import bulk, step_sizes, tying, value_factors
from curvlens.papers.first_paper.differentiated import flat_hessian, functional_part
from curvlens.papers.first_paper.layer import LENGTH, WIDTH
from curvlens.papers.full_block import layer_coupling, tokens
from curvlens.papers.learners import trained
from curvlens.papers.setting import hessian_at


def close(found: Tensor, truth: Tensor, rel: float = 1e-10) -> None:
    assert float((found - truth).norm()) <= rel * float(truth.norm())


def test_draws_for_two_purposes_are_independent() -> None:
    same, tokens_, weights = Draws(3)(50_000), Draws(3, "tokens")(50_000), Draws(3, "weights")(50_000)
    assert torch.equal(same, torch.randn(50_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert torch.equal(tokens_, Draws(3, "tokens")(50_000))
    for a, b in ((same, tokens_), (tokens_, weights), (tokens_, Draws(4, "tokens")(50_000))):
        assert abs(float((a * b).mean())) < 5 / math.sqrt(50_000)


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


@pytest.mark.parametrize("kind", list(tokens.KINDS))
def test_the_hessian_by_tokens(kind: str) -> None:
    """Against differences of gradients; and where attention is a constant, against its closed form."""
    x, loss = tokens.network({"kind": kind, "sigma": 0.7, "seed": 2})
    found, step = tokens.hessian(loss, x), 1e-5

    def gradient(at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(loss(at), at)[0].flatten()

    units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    columns = [(gradient(x + step * unit) - gradient(x - step * unit)) / (2 * step) for unit in units]
    close(found, torch.stack(columns, 1), rel=1e-8)
    if kind == "uniform":
        numbers = tokens.measure({"kind": kind, "sigma": 0.7, "seed": 2})
        assert numbers["coupling"] == pytest.approx(1.0, rel=1e-12)
        assert numbers["beside"] / numbers["own"] == pytest.approx(math.sqrt(tokens.LENGTH - 1), rel=1e-12)


class Straight(nn.Module):
    """A norm to first order in its input, its scale and its shift: no second derivative of its own."""

    def __init__(self, norm: Any, x: Tensor) -> None:
        super().__init__()
        self.norm, self.x = norm, x
        self.n = norms.forward(x, eps=norm.eps)
        self.slope = norms.jacobian(x, eps=norm.eps)
        self.gamma = norm.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        moved = (self.slope @ (x - self.x)[..., None]).squeeze(-1)
        found: Tensor = self.norm.weight * self.n + self.gamma * moved + self.norm.bias
        return found


def product(model: nn.Module, ids: Tensor, labels: Tensor, parameters: list[Tensor], v: Tensor) -> Tensor:
    """H v of the cross-entropy, reverse over reverse."""
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = torch.cat([grad.flatten() for grad in grads]) @ v
        found = torch.autograd.grad(inner, parameters, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def straightened(norm: str) -> tuple[GPT, GPT, Tensor, Tensor]:
    """The network of `layer_coupling`, the same with straight norms, and the data."""
    task = Addition(digits=2)
    seed = stream(1, "weights")
    model = trained(task, seed=seed, steps=0, n_layer=layer_coupling.LAYERS, norm=norm)
    ids, labels = task.batch(layer_coupling.SAMPLES, seed=stream(1, "sequences"))
    straight = copy.deepcopy(model)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
    model(ids)
    for name, x in seen.items():
        parent, _, last = name.rpartition(".")
        setattr(straight.get_submodule(parent), last, Straight(straight.get_submodule(name), x))
    return model, straight, ids, labels


def weights(model: GPT, names: Iterable[str]) -> list[Tensor]:
    """Parameters by the names that they have without straight norms."""
    own = {name.replace(".norm.", "."): weight for name, weight in model.named_parameters()}
    return [own[name] for name in names]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_coupling, "LAYERS", 2)
    monkeypatch.setattr(layer_coupling, "SAMPLES", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_norms_part_is_what_straight_norms_lack(norm: str) -> None:
    """H minus the norms' parts is the Hessian of a network whose norms are their first-order expansions."""
    H, places = layer_coupling.network({"norm": norm, "seed": 1})
    model, straight, ids, labels = straightened(norm)
    v = torch.randn(H.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(H.matvec(v), product(model, ids, labels, weights(model, places), v))
    parts = [name for name in H.part_names if layer_coupling.is_norm(name)]
    assert len(parts) == (5 if norm == "pre" else 4)
    through = sum((H.matvec(v, name) for name in parts), torch.zeros_like(v))
    close(H.matvec(v) - through, product(straight, ids, labels, weights(straight, places), v))


@pytest.mark.full
@pytest.mark.usefixtures("few")
def test_the_share_of_the_norms_in_the_coupling() -> None:
    """All numbers of a point, from products of both networks with unit vectors."""
    _, places = layer_coupling.network({"norm": "pre", "seed": 1})
    model, straight, ids, labels = straightened("pre")
    layers = [[name for name in places if name.startswith(f"h.{layer}.")] for layer in range(2)]
    names = [*layers[0], *layers[1]]
    cut, size = (sum(places[n].stop - places[n].start for n in of) for of in (layers[0], names))
    whole, without = (
        torch.stack([product(each, ids, labels, weights(each, names), v) for v in torch.eye(size).double()])
        for each in (model, straight)
    )
    crossed, own = whole[:cut, cut:], [whole[:cut, :cut].norm(), whole[cut:, cut:].norm()]
    found = layer_coupling.measure({"norm": "pre", "seed": 1})
    assert found["coupling"] == [pytest.approx(float(crossed.norm() / (own[0] * own[1]).sqrt()), rel=1e-9)]
    share = ((whole - without)[:cut, cut:] * crossed).sum() / crossed.square().sum()
    assert found["shares"]["norms"] == pytest.approx(float(share), rel=1e-8)


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
