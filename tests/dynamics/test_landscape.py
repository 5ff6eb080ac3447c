"""The landscape against dense derivatives of single samples, against random points, and its slopes."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.data import Addition
from curvlens.dynamics import landscape, per_sample
from curvlens.dynamics.landscape import _holds
from curvlens.dynamics.per_sample import measured
from curvlens.dynamics.separated import Separated
from curvlens.papers.learners import trained

D = torch.float64


def regression(n: int, d: int = 6, seed: int = 0) -> cl.Problem:
    """Square error of a linear model: its loss is its own quadratic model."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=D)
    y = x.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=D)
    model = nn.Linear(d, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, d, generator=generator, dtype=D))
    return cl.Problem(model, (x, y), cl.losses.MSE())


def dense(problem: cl.Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and Hessian of every sample of a regression, written out."""
    x, y = problem.data.first()
    r = x @ problem.theta - y[:, 0]
    return r.square(), 2 * r[:, None] * x, 2 * x[:, :, None] * x[:, None, :]


def test_samples_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = regression(20)
    loss, g, H = dense(problem)
    exact = measured(Separated(problem, 1), torch.eye(6, dtype=D), 2, 0, lambda: None)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(exact.loss, loss, **close)
    torch.testing.assert_close(exact.gradients, g @ g.T, **close)
    torch.testing.assert_close(exact.traces, H.diagonal(dim1=1, dim2=2).sum(1), **close)
    torch.testing.assert_close(exact.hessians, torch.einsum("iab,jab->ij", H, H), **close)
    # all 64 vectors of signs: their mean is the expectation of probes
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=D)] * 6)
    monkeypatch.setattr(per_sample, "_signs", lambda *_: signs)
    sampled = measured(Separated(problem, 1), None, 64, 0, lambda: None)
    torch.testing.assert_close(sampled.traces, exact.traces, **close)
    torch.testing.assert_close(sampled.hessians, exact.hessians, **close)
    forms = torch.einsum("pa,iab,pb->ip", signs, H, signs)
    apart = ~torch.eye(64, dtype=torch.bool)
    pairs = (forms[:, None, :, None] * forms[None, :, None, :])[..., apart].mean(-1)  # of two different probes
    torch.testing.assert_close(sampled.trace_products, pairs, **close)


SETTINGS = [
    pytest.param(around, radius, directions, seed, marks=[] if seed in (1, 2) and radius == 1.0 else pytest.mark.full)
    for around in ("sphere", "gaussian")
    for radius in (0.05, 1.0)
    for directions, seed in ((6, 0), (6, 1), (2, 2), (3, 3), (1, 4))
]


@pytest.mark.parametrize(("around", "radius", "directions", "seed"), SETTINGS)
def test_closed_moments_are_those_of_random_points(around: str, radius: float, directions: int, seed: int) -> None:
    """In 20 settings, on losses that are quadratic: within the sampling error of 400 points."""
    problem = regression(32, seed=seed)
    basis = torch.linalg.qr(torch.randn(6, directions, generator=torch.Generator().manual_seed(seed), dtype=D)).Q.T
    found = landscape(problem, radius, around=around, basis=basis, ks=[2, 8, 24], orders=40, points=400, seed=seed)  # type: ignore[arg-type]
    assert bool(((found.true_second - found.second).abs() <= 4 * found.true_error + 1e-12).all())
    half = 4 * (found.true_second / 400).sqrt()
    assert bool(((found.true_mean - found.mean).abs() <= half + 1e-12).all())
    assert bool((found.true_error < 0.2 * found.second).all())  # close enough to tell
    assert found.around == "subspace"
    if around == "sphere":
        assert bool((found.bound.sum(0) ** 2 >= 0.99 * found.true_mean**2).all())


@pytest.mark.parametrize("around", ["sphere", "gaussian"])
def test_the_three_terms(around: str) -> None:
    """Of Δl + Δgᵀδ + ½ δᵀΔHδ: their squares by Gaussian quadrature in two dimensions, order by order."""
    problem, radius, k = regression(16, d=2), 0.7, 5
    basis = torch.eye(2, dtype=D)
    found = landscape(problem, radius, around=around, basis=basis, ks=[k], orders=20, points=2, seed=3)  # type: ignore[arg-type]
    loss, g, H = dense(problem)
    generator = torch.Generator().manual_seed(3 + 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    if around == "sphere":
        angles = torch.arange(16, dtype=D) * (2 * math.pi / 16)
        points, mass = radius * torch.stack([angles.cos(), angles.sin()], 1), torch.full((16,), 1 / 16, dtype=D)
    else:
        x, w = torch.tensor(nodes), torch.tensor(weights / weights.sum())
        points, mass = radius * torch.cartesian_prod(x, x), torch.outer(w, w).flatten()
    squares, cross = torch.zeros(3, dtype=D), 0.0
    for _ in range(20):
        order = torch.randperm(16, generator=generator)
        dl, dg, dH = (each[order[k]] - each[order[:k]].mean(0) for each in (loss, g, H))
        constant, linear = dl.expand(len(points)), points @ dg
        quadratic = ((points @ dH) * points).sum(1) / 2
        squares += torch.stack([(mass * term.square()).sum() for term in (constant, linear, quadratic)]) / 20
        cross += float((mass * 2 * constant * quadratic).sum()) / 20
    assert found.terms is not None
    torch.testing.assert_close(found.terms[:, 0, 0], squares, rtol=1e-9, atol=0)
    assert float(found.terms.sum()) + cross == pytest.approx(float(found.second), rel=1e-9)


def test_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a problem of the block alone, and as a basis of its unit vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 2)).double()
    data = (torch.randn(18, 3, dtype=D), torch.randint(2, (18,)))
    problem = cl.Problem(model, data, cl.losses.CrossEntropy())
    alone = cl.Problem(model, data, cl.losses.CrossEntropy(), params="2.weight")
    inside = problem.layout.embed(alone.layout, torch.ones(alone.layout.size)) > 0
    # in the place of random probes those whose mean is the expectation
    monkeypatch.setattr(per_sample, "_signs", lambda _, size, *rest: size**0.5 * torch.eye(size, dtype=D))
    options: dict[str, Any] = {"ks": [4, 8], "orders": 20, "points": 40}
    for around in ("sphere", "gaussian"):
        rows = torch.eye(problem.layout.size, dtype=D)[inside]
        exact = landscape(problem, 0.1, around=around, basis=rows, **options)
        found = landscape(problem, 0.1, around=around, within="2.weight", **options)
        own = landscape(alone, 0.1, around=around, **options)
        assert found.around == "subspace"
        for name in ("gradient_distance", "hessian_distance", "mean", "true_second", "bound"):
            torch.testing.assert_close(getattr(found, name), getattr(own, name))
            torch.testing.assert_close(getattr(found, name), getattr(exact, name))
        assert bool(((found.true_second - exact.second).abs() < 4 * found.true_error).all())
    union = landscape(problem, ks=[8], orders=20, within=["2.weight", "0.bias"])
    assert found.gradient_distance[1] < union.gradient_distance[0] < landscape(problem, **options).gradient_distance[1]


def test_ragged_samples() -> None:
    """Increments of a loss over sequences of unequal length, in order, by hand."""
    problem = cl.Problem(small.gpt(), small.tokens_and_labels(18), cl.losses.CrossEntropy())
    tokens, labels = small.tokens_and_labels(18)
    found = landscape(problem, ks=[4, 9], curvature=False, orders=20)
    sums, counts = [], []
    for i in range(18):
        rows = nn.functional.cross_entropy(problem.model(tokens[i : i + 1])[0], labels[i], reduction="none")
        sums.append(rows.detach().sum())
        counts.append((labels[i] != -100).sum())
    S, c = torch.stack(sums), torch.stack(counts).double()
    generator = torch.Generator().manual_seed(1)
    steps = torch.zeros(2, dtype=D)
    for _ in range(20):
        order = torch.randperm(18, generator=generator)
        means = S[order].cumsum(0) / c[order].cumsum(0)
        steps += torch.stack([(means[k] - means[k - 1]).square() for k in (4, 9)])
    torch.testing.assert_close(found.increment, (steps / 20).sqrt(), rtol=1e-9, atol=1e-12)


def nodes(around: str, radius: float) -> tuple[Tensor, Tensor]:
    """Points of the plane and their weights: exact for polynomials of degree 4."""
    if around == "sphere":
        angles = torch.arange(16, dtype=D) * (math.pi / 8)
        return radius * torch.stack([angles.cos(), angles.sin()], 1), torch.full((16,), 1 / 16, dtype=D)
    x, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(8))
    w = w / w.sum()
    return radius * torch.cartesian_prod(x, x), torch.outer(w, w).flatten()


@pytest.mark.parametrize("around", ["sphere", "gaussian"])
@pytest.mark.parametrize("wrong", ["", "trace", "gradient", "norm"])
def test_closed_moments_by_quadrature(around: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On losses that are quadratic, to rounding. A part of the moments that is 10 % off is seen."""
    real = measured

    def off(*args: Any, **options: Any) -> per_sample.PerSample:
        found = real(*args, **options)
        names = {"trace": ("traces", "trace_products"), "gradient": ("gradients",), "norm": ("hessians",)}[wrong]
        return dataclasses.replace(found, **{name: 1.1 * getattr(found, name) for name in names})

    if wrong:
        monkeypatch.setattr(sys.modules["curvlens.dynamics.landscape"], "measured", off)
    problem = regression(32)
    basis = torch.linalg.qr(small.direction(12).reshape(6, 2)).Q.T
    found = landscape(problem, 1.5, around=around, basis=basis, ks=[2, 8, 24], orders=20, points=2)  # type: ignore[arg-type]
    loss, g, H = dense(problem)
    points, weights = nodes(around, 1.5)
    d = points @ basis
    at = loss[:, None] + g @ d.T + 0.5 * torch.einsum("pa,iab,pb->ip", d, H, d)  # of sample i at point p
    generator = torch.Generator().manual_seed(1)
    D_k = torch.zeros(3, 20, len(d), dtype=D)
    for order in range(20):
        permutation = torch.randperm(32, generator=generator)
        for j, k in enumerate((2, 8, 24)):
            D_k[j, order] = at[permutation[k]] - at[permutation[:k]].mean(0)
    exact = torch.stack([(D_k @ weights).mean(1), (D_k.square() @ weights).mean(1)])
    apart = ((torch.stack([found.mean[0], found.second[0]]) - exact) / exact).abs().max()
    assert float(apart) < 1e-9 if not wrong else float(apart) > 1e-3


@pytest.mark.full
def test_slopes_on_a_trained_gpt() -> None:
    """With 10,240 samples and k from 16 to 1024, over 200 orders."""
    task = Addition(digits=2)
    model = trained(task, seed=0, steps=200)
    problem = cl.Problem(model, task.batch(10_240, seed=7), cl.losses.CrossEntropy())
    found = landscape(problem, ks=[2**i for i in range(4, 11)], curvature=False, orders=400)
    assert float(found.slopes["increment"]) == pytest.approx(-1, abs=0.05)
    assert float(found.slopes["distance"]) == pytest.approx(-0.5, abs=0.05)


def test_slopes() -> None:
    """Increments fall like 1/k, distances like 1/√k: of the loss, the gradient and the Hessian."""
    found = landscape(regression(2048), ks=[16, 32, 64, 128, 256, 512], orders=200, probes=2)
    assert float(found.slopes["increment"]) == pytest.approx(-1, abs=0.05)
    for name in ("distance", "gradient", "hessian"):
        assert float(found.slopes[name]) == pytest.approx(-0.5, abs=0.05)
        assert abs(float(found.slopes[name]) + 0.5) < 4 * float(found.slopes[name].stderr) + 0.01


def test_a_gpt_is_quadratic_nearby_only() -> None:
    problem = cl.Problem(small.gpt(), small.tokens_and_labels(18), cl.losses.CrossEntropy())
    before = problem.theta
    found = landscape(problem, [0.02, 30.0], ks=[4, 8], orders=20, points=24, probes=16)
    assert found.holds is None or found.holds < 30
    apart = (found.true_second / found.second - 1).abs()
    assert float(apart[0].max()) < 0.5
    assert float(apart[1].max()) > 0.5
    assert torch.equal(problem.theta, before)


def test_bad_input() -> None:
    problem = regression(20)
    for options, message in (
        ({"radii": -1.0}, r"radii=-1\.0, expected numbers from"),
        ({"radii": None}, "radii=None"),
        ({"radii": "0.1"}, r"radii='0\.1'"),
        ({"radii": [0.1, 1e100]}, "to 1e"),
        ({"ks": "many"}, "ks='many'"),
        ({"radii": 0.1, "basis": torch.ones(0, 6, dtype=D)}, r"shape \(0, 6\)"),
        ({"around": "cube"}, "around='cube'"),
        ({"ks": [30]}, "from 1 to 19: the data has 20 samples"),
        ({"orders": 3}, "orders=3"),
        ({"radii": 0.1, "curvature": False}, "need gradients and Hessians"),
        ({"radii": 0.1, "basis": torch.ones(2, 6, dtype=D)}, "not orthonormal"),
        ({"radii": 0.1, "basis": torch.ones(2, 5, dtype=D)}, r"expected \(directions, 6\)"),
        ({"radii": 0.1, "basis": torch.eye(6, dtype=D), "within": "weight"}, "Give one of them"),
        ({"radii": 0.1, "within": "h.7"}, "h.7"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            landscape(problem, **options)
    with pytest.raises(cl.CurvlensError, match="needs 16 single samples"):
        landscape(regression(5))


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # of low precision
def test_pictures_and_tables() -> None:
    found = landscape(regression(40), [0.1, 1.0], ks=[2, 8], orders=20, points=4)
    assert [row["radius"] for row in found.around_table()] == [0.1, 0.1, 1.0, 1.0]
    settling, around, both = (json.dumps(found.plot(what=what).to_dict()) for what in ("settling", "around", "all"))
    assert "k^-\\u00bd" in settling
    assert '"title": "distance 0.1"' in around
    assert "true loss" in both
    plain = landscape(regression(40), ks=[2, 8], orders=20, curvature=False)
    assert "loss (nats)" in json.dumps(plain.plot(what="all").to_dict())
    with pytest.raises(cl.CurvlensError, match="no surroundings"):
        plain.plot(what="around")
    with pytest.raises(cl.CurvlensError, match="what='bound', expected"):
        found.plot(what="bound")
    assert "not quadratic at 0.1" in repr(dataclasses.replace(found, holds=None, note=""))


def test_no_samples() -> None:
    model = nn.Linear(6, 1).double()
    with pytest.raises(cl.CurvlensError, match="no samples"):
        landscape(cl.Problem(model, (torch.zeros(0, 6, dtype=D), torch.zeros(0, 1, dtype=D)), cl.losses.MSE()))


def test_one_number_is_a_list_of_one() -> None:
    found = landscape(regression(20), torch.tensor(0.1), ks=4, orders=20, points=2)  # type: ignore[arg-type]
    assert found.k.tolist() == [4]
    assert found.radii.tolist() == pytest.approx([0.1])


def test_the_error_by_probes() -> None:
    """Over many draws of probes: about as large as the distance from the exact moments; and the radius is not told."""
    problem = regression(24, seed=1)
    make: dict[str, Any] = {"ks": [4, 12], "orders": 20, "points": 2}
    exact = landscape(problem, 1.0, basis=torch.eye(6, dtype=D), **make)
    assert exact.second_error is not None
    assert not bool(exact.second_error.any())
    found = [landscape(problem, 1.0, probes=6, seed=seed, **make) for seed in range(30)]
    same = [landscape(problem, 1.0, basis=torch.eye(6, dtype=D), seed=seed, **make) for seed in range(30)]
    off = torch.stack([(a.second - b.second) for a, b in zip(found, same, strict=True)])
    errors = torch.stack([each.second_error for each in found if each.second_error is not None])
    assert bool(((off.square().mean(0) / errors.square().mean(0)).log().abs() < math.log(3)).all())
    assert float((off.abs() <= 3 * errors).double().mean()) > 0.85

    rough = landscape(problem, 0.01, probes=2, **make)
    assert rough.second_error is not None
    assert bool(rough.second_error.isnan().all())
    assert rough.holds is None
    assert "2 probes have no error" in repr(rough)
    one, small_error, large = (
        torch.ones(1, 2, dtype=D),
        torch.full((1, 2), 0.01, dtype=D),
        torch.full((1, 2), 0.3, dtype=D),
    )
    assert _holds([0.5], one, 1.02 * one, small_error, small_error) == (0.5, "")
    for points, probes, few in ((small_error, large, "probes"), (large, small_error, "points")):
        held, note = _holds([0.5], one, 1.2 * one, points, probes)
        assert held is None
        assert f"give more {few}" in note


def test_samples_that_are_all_the_same_have_no_slopes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x, y = torch.randn(1, 6, dtype=D).expand(24, 6), torch.randn(1, 1, dtype=D).expand(24, 1)
    found = landscape(cl.Problem(model, (x.clone(), y.clone()), cl.losses.MSE()), orders=20)
    assert not bool(found.increment.any() or found.hessian_distance.any())
    assert all(math.isnan(float(slope)) for slope in found.slopes.values())
    assert "not known" in repr(found)


@pytest.mark.filterwarnings("ignore:The operator is in float32")
def test_in_float32() -> None:
    data = small.tokens_and_labels(18)
    found = [
        landscape(cl.Problem(model, data, cl.losses.CrossEntropy()), 0.05, ks=[4, 8], orders=20, points=4, probes=2)
        for model in (small.gpt(), small.gpt().float())
    ]
    for name in ("increment", "second", "hessian_distance"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=1e-3, atol=1e-5)
