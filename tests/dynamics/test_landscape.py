"""The landscape against dense derivatives of single samples, against random points, and its slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import landscape, per_sample
from curvlens.dynamics.per_sample import measured
from curvlens.dynamics.separated import Separated

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
        ({"radii": -1.0}, "positive numbers"),
        ({"around": "cube"}, "around='cube'"),
        ({"ks": [30]}, "from 1 to 19: the data has 20 samples"),
        ({"orders": 3}, "orders=3"),
        ({"radii": 0.1, "curvature": False}, "need gradients and Hessians"),
        ({"radii": 0.1, "basis": torch.ones(2, 6, dtype=D)}, "not orthonormal"),
        ({"radii": 0.1, "basis": torch.ones(2, 5, dtype=D)}, r"expected \(directions, 6\)"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            landscape(problem, **options)
    with pytest.raises(cl.CurvlensError, match="needs 16 single samples"):
        landscape(regression(5))


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # of low precision
def test_in_float32() -> None:
    data = small.tokens_and_labels(18)
    found = [
        landscape(cl.Problem(model, data, cl.losses.CrossEntropy()), 0.05, ks=[4, 8], orders=20, points=4, probes=2)
        for model in (small.gpt(), small.gpt().float())
    ]
    for name in ("increment", "second", "hessian_distance"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=1e-3, atol=1e-5)
