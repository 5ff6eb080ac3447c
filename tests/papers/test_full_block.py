"""The experiments on the full block, against independent truths."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.calculus import norms
from curvlens.data import Addition
from curvlens.models import GPT
from curvlens.papers.draws import stream
from curvlens.papers.full_block import layer_coupling, tokens, within_block
from curvlens.papers.learners import trained
from networks import close, product


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


@pytest.mark.full
@pytest.mark.parametrize("norm", ["pre", "none"])
def test_norms_inside_a_block_are_those_of_the_differentiated_hessian(norm: str) -> None:
    config = {"norm": norm, "steps": 0, "seed": 0}
    found = within_block.measure(config)
    model = trained(Addition(digits=2), seed=0, steps=0, n_layer=2, norm=norm)
    problem = cl.Problem(model, [Addition(digits=2).batch(16, seed=0)], cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    groups = ("attn", "mlp", "norm")[: 3 if norm == "pre" else 2]
    names = [[n for n, _ in model.named_parameters() if n.startswith(f"h.1.{group}")] for group in groups]
    parts = [H[each].dense() for each in names]
    whole = H[[n for each in names for n in each]].dense()
    for i, part in enumerate(parts):
        assert found["frobenius"][1][i][i] == pytest.approx(float(part.norm()), rel=1e-8)
        assert found["spectral"][1][i][i] == pytest.approx(float(torch.linalg.matrix_norm(part, 2)), rel=1e-8)
    squares = torch.tensor(found["frobenius"][1], dtype=torch.float64).square()
    assert float(squares.sum().sqrt()) == pytest.approx(float(whole.norm()), rel=1e-8)
