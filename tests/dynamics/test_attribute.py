"""The curvature along a direction: dense blocks, closed forms of a small network, and finite differences."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import attribute
from curvlens.results import Status

LOSS = cl.losses.CrossEntropy()


def problem() -> cl.Problem:
    return cl.Problem(small.gpt(), small.tokens_and_labels(4), LOSS)


def direction(asked: cl.Problem, seed: int = 1) -> Tensor:
    return torch.randn(asked.layout.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("by", ["block", "head", "layer", "role", "parameter"])
def test_parts_are_those_of_dense_blocks(by: str) -> None:
    asked = problem()
    u, H = direction(asked), cl.hessian(asked).dense()
    found = attribute(asked, u, by, pairs=True)  # type: ignore[arg-type]
    truth = float(u @ H @ u)
    assert found.total == pytest.approx(truth, rel=1e-12)
    own, bent = asked.blocks.by(by).split(u), asked.blocks.by(by).split(H @ u)  # type: ignore[arg-type]
    scale = sum(abs(float(own[name] @ bent[name])) for name in own)
    assert list(found.blocks) == list(own)
    for name, part in found.blocks.items():
        assert abs(float(part) - float(own[name] @ bent[name])) < 1e-12 * scale
        assert part.exact
    assert abs(sum(map(float, found.blocks.values())) - truth) < 1e-12 * scale
    places = asked.blocks.by(by).split(torch.arange(asked.layout.size))  # type: ignore[arg-type]
    assert found.pairs is not None
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            between = u[places[a]] @ H[places[a]][:, places[b]] @ u[places[b]]
            assert abs(float(found.pairs[i, j]) - float(between)) < 1e-12 * scale
    assert found.status is Status.EXACT
    assert found.products == 1 + len(places)


def test_modules_against_finite_differences() -> None:
    """H along u from differences of the gradient; G along u from differences of the outputs."""
    asked = problem()
    u = direction(asked) / asked.layout.size**0.5
    found = attribute(asked, u, modules=True)
    assert found.ggn is not None
    assert found.modules is not None
    assert found.functional is not None
    h = 1e-5
    theta = asked.theta
    ahead, behind = (asked.with_params(theta + s * h * u).gradient() for s in (1, -1))
    assert float(u @ (ahead - behind)) / (2 * h) == pytest.approx(found.total, rel=1e-8)
    tokens, labels = small.tokens_and_labels(4)
    model, seen = asked.model, labels != -100

    def outputs(t: float) -> Tensor:
        point = asked.layout.unflatten(theta + t * u)
        logits: Tensor = torch.func.functional_call(model, point, (tokens,))
        return logits[seen]

    p = outputs(0).softmax(-1)
    J = (outputs(h) - outputs(-h)) / (2 * h)
    outer = ((p * J * J).sum(-1) - (p * J).sum(-1).square()).mean()
    assert float(outer) == pytest.approx(found.ggn, rel=1e-7)
    size = abs(found.ggn) + sum(map(abs, found.modules.values()))
    assert abs(found.ggn + found.functional - found.total) < 1e-12 * size
    assert found.mismatch < 1e-12
    assert found.inside("") == pytest.approx(found.functional, rel=1e-12)
    for path, part in found.modules.items():
        M = cl.operators.module_part(asked, path, own=True)
        assert abs(float(u @ (M @ u)) - part) < 1e-12 * size


def test_the_sum_over_layers_and_a_known_product() -> None:
    asked = problem()
    u = direction(asked)
    by_block, by_layer = attribute(asked, u), attribute(asked, u, "layer", product=cl.hessian(asked) @ u)
    assert by_layer.products == 0
    for layer in asked.blocks.layers:
        assert float(by_block.blocks[layer]) == pytest.approx(float(by_layer.blocks[layer]), rel=1e-10)
    as_dict = attribute(asked, asked.layout.unflatten(u))
    assert as_dict.total == by_block.total
    assert by_block.curvature == pytest.approx(by_block.total / float(u @ u))
    assert sum(row["share"] for row in by_block.table()) == pytest.approx(1)


def test_an_eigenvector_has_its_eigenvalue() -> None:
    asked = problem()
    top = cl.eigs(cl.hessian(asked), 1)
    found = attribute(asked, top.vectors[:, -1])
    assert found.curvature == pytest.approx(float(top.values[-1]), rel=1e-8)
    column = attribute(asked, top.vectors, product=cl.hessian(asked) @ top.vectors)  # (P, 1)
    assert column.total == pytest.approx(found.total, rel=1e-8)


def test_bad_input() -> None:
    asked = problem()
    with pytest.raises(cl.CurvlensError, match="0 in every entry"):
        attribute(asked, torch.zeros(asked.layout.size, dtype=torch.float64))
    with pytest.raises(cl.CurvlensError, match="flat vector of"):
        attribute(asked, torch.ones(3))
    with pytest.raises(cl.CurvlensError, match=r"one vector, got 3 columns. Give one of them, as vectors\[:, 0\]"):
        attribute(asked, torch.ones(asked.layout.size, 3))
    with pytest.raises(cl.CurvlensError, match="NaN or infinite"):
        attribute(asked, torch.full((asked.layout.size,), torch.nan))
    with pytest.raises(cl.CurvlensError, match="by='token'"):
        attribute(asked, direction(asked), "token")  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="modules=True"):
        attribute(asked, direction(asked)).inside("h.0")
    with pytest.raises(cl.CurvlensError, match=r"No module 'h\.9'"):
        attribute(asked, direction(asked), modules=True).inside("h.9")

    def number(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    whole = cl.Problem(small.gpt(), small.tokens_and_labels(4), number)
    assert attribute(whole, direction(whole)).total != 0
    with pytest.raises(cl.CurvlensError, match="outputs"):
        attribute(whole, direction(whole), modules=True)


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # of low precision
def test_in_float32() -> None:
    exact = problem()
    u = direction(exact)
    found = attribute(cl.Problem(small.gpt().float(), small.tokens_and_labels(4), LOSS), u.float(), modules=True)
    assert found.total == pytest.approx(attribute(exact, u).total, rel=1e-4)


def test_tables_and_pictures_of_modules_and_pairs() -> None:
    asked = problem()
    found = attribute(asked, direction(asked), modules=True, pairs=True)
    rows = found.module_table()
    assert sum(row["part"] for row in rows) == pytest.approx(found.total)
    assert rows[0]["module"] == "G" or abs(rows[0]["part"]) >= abs(found.ggn or 0.0)
    assert f"by module: {next(row['module'] for row in rows if row['module'] != 'G')}" in repr(found)
    pairs = found.pair_table()
    assert sum(row["part"] for row in pairs) == pytest.approx(found.total)
    assert {row["block"] for row in pairs} == set(found.blocks)
    picture = found.plot(what="modules").to_dict()
    assert "own code of each module" in json.dumps(picture)
    assert len(rows) > 12
    assert [row["module"] for row in picture["data"]["values"]] == [row["module"] for row in rows[:12]]
    assert picture["title"] == f"the 12 largest of {len(rows)}"
    few = replace(found, modules=dict(list((found.modules or {}).items())[:3])).plot(what="modules").to_dict()
    assert "title" not in few
    assert '"with"' in json.dumps(found.plot(what="pairs").to_dict())
    with pytest.raises(cl.CurvlensError, match="what='heads', expected"):
        found.plot(what="heads")
    plain = attribute(asked, direction(asked))
    for table, option in ((plain.module_table, "modules=True"), (plain.pair_table, "pairs=True")):
        with pytest.raises(cl.CurvlensError, match=option):
            table()
