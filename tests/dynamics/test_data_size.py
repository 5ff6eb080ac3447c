"""Data sizes: against plain statistics, and by drawing fresh data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.data import Addition
from curvlens.dynamics import data_size
from curvlens.papers.learners import trained


def regression(n: int, seed: int) -> tuple[cl.Problem, Tensor, Tensor]:
    """A fixed linear model, and fresh data of any size: heavy-tailed losses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=torch.float64).sinh()
    model = nn.Linear(6, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return cl.Problem(model, (x, y), cl.losses.MSE()), x, y


def losses(x: Tensor, y: Tensor) -> Tensor:
    return (x.sum(1) - y[:, 0]).square()


def gradients(x: Tensor, y: Tensor) -> Tensor:
    return 2 * (x.sum(1) - y[:, 0])[:, None] * x


def test_root_mean_squares() -> None:
    problem, x, y = regression(300, 0)
    for of, each in (("loss", losses(x, y)[:, None]), ("gradient", gradients(x, y))):
        variance = float(each.var(0).sum())
        found = data_size(problem, 0.05, of)  # type: ignore[arg-type]
        assert float(found.spread) == pytest.approx(variance**0.5, rel=1e-10)
        k = found.increment
        assert math.sqrt(variance / (k * (k + 1))) <= 0.05 < math.sqrt(variance / (k * (k - 1)))
        assert found.distance == math.ceil(variance / 0.05**2)


def test_spread_of_ragged_samples() -> None:
    """Against the change of the loss when one sample is left out: its influence on a quotient of sums."""
    asked = cl.Problem(small.gpt(), small.tokens_and_labels(8), cl.losses.CrossEntropy())
    tokens, labels = small.tokens_and_labels(8)
    found = data_size(asked, 0.01)
    sums, counts = [], []
    for i in range(8):
        rows = nn.functional.cross_entropy(asked.model(tokens[i : i + 1])[0], labels[i], reduction="none")
        sums.append(float(rows.detach().sum()))
        counts.append(float((labels[i] != -100).sum()))
    S, c = torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    e = 8 / c.sum() * (S - c * S.sum() / c.sum())
    assert float(found.spread) == pytest.approx(float(e.square().sum() / 7) ** 0.5, rel=1e-9)


def test_of_a_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    """H_i = 2 x xᵀ: with all unit vectors as probes, against plain statistics; with random ones nearly."""
    problem, x, _ = regression(300, 0)
    H = 2 * x[:, :, None] * x[:, None, :]
    variance = float(H.flatten(1).var(0).sum())
    sampled = data_size(problem, 0.5, "hessian", probes=64)
    assert float(sampled.spread) == pytest.approx(variance**0.5, rel=0.05)
    assert sampled.distance == pytest.approx(variance / 0.25, rel=0.1)
    fewer = data_size(problem, 0.5, "hessian", samples=100, probes=2)
    assert fewer.samples == 100
    signs = 0.5 + 0.5 * math.sqrt(6) * torch.eye(6, dtype=torch.float64)  # becomes √6 e_j
    monkeypatch.setattr(torch, "randint", lambda *_, **__: signs)
    found = data_size(problem, 0.5, "hessian", probes=6)
    assert float(found.spread) == pytest.approx(variance**0.5, rel=1e-10)
    assert found.distance == math.ceil(variance / 0.25)


@pytest.mark.full
def test_fresh_draws_hold_on_a_gpt() -> None:
    """At 90 % confidence, on sequences that a trained GPT has not seen, in both readings."""
    task = Addition(digits=2)
    model = trained(task, seed=0, steps=200)

    @torch.no_grad()
    def each(seed: int, count: int) -> Tensor:
        x, y = task.batch(count, seed=seed)
        rows = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        kept = (y != -100).double()
        return rows.view_as(y).double().mul(kept).sum(1) / kept.sum(1)

    found = data_size(cl.Problem(model, task.batch(2000, seed=5), cl.losses.CrossEntropy()), 0.03, confidence=0.9)
    limit = float(each(10**6, 100_000).mean())
    near = settled = 0
    for seed in range(100):
        fresh = each(2 * 10**6 + seed, max(found.distance, found.increment + 1))
        near += abs(float(fresh[: found.distance].mean()) - limit) <= 0.03
        k = found.increment
        settled += abs(float(fresh[: k + 1].mean() - fresh[:k].mean())) <= 0.03
    assert 85 <= near < 100
    assert settled >= 85


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_fresh_draws_hold(of: str) -> None:
    """At 90 % confidence at least 85 of 100 fresh draws are within the tolerance, in both readings."""
    problem, _, _ = regression(2000, 1)
    tolerance = 0.4 if of == "loss" else 0.8
    found = data_size(problem, tolerance, of, confidence=0.9)  # type: ignore[arg-type]
    limit = torch.tensor([(math.e**2 - 1) / 2]) if of == "loss" else torch.zeros(6, dtype=torch.float64)
    each = losses if of == "loss" else gradients
    near = settled = 0
    for seed in range(100):
        _, x, y = regression(found.distance + 1, 1000 + seed)
        values = each(x, y).reshape(len(x), -1)
        near += float((values[:-1].mean(0) - limit).norm()) <= tolerance
        k = found.increment
        settled += float((values[: k + 1].mean(0) - values[:k].mean(0)).norm()) <= tolerance
    assert near >= 85
    assert settled >= 85
    assert near < 100 or settled < 100  # a size that always holds would be too large


@pytest.mark.parametrize("tolerance", [1e-200, 5e-324])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_a_tolerance_that_no_data_can_meet(tolerance: float, confidence: float | None) -> None:
    model = torch.nn.Linear(3, 1).double()
    x, y = (torch.randn(32, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (3, 1))
    with pytest.raises(cl.CurvlensError, match=r"more than 1e\+15 samples"):
        data_size(cl.Problem(model, (x, y), cl.losses.MSE()), tolerance, confidence=confidence)
    with pytest.raises(cl.CurvlensError, match=r"more than 1e\+15 samples"):
        data_size(cl.Problem(model, (x, 1e100 * y), cl.losses.MSE()), 0.1, confidence=confidence)


def test_bad_input() -> None:
    problem, _, _ = regression(20, 0)
    for options, message in (
        ({"tolerance": 0}, "tolerance=0"),
        ({"tolerance": 0.1, "of": "trace"}, "of='trace'"),
        ({"tolerance": 0.1, "confidence": 1.5}, r"confidence=1\.5"),
        ({"tolerance": 0.1, "samples": 2}, "samples=2"),
        ({"tolerance": 0.1, "of": "hessian", "probes": 1}, "probes=1"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            data_size(problem, **options)
    with pytest.raises(cl.CurvlensError, match="needs 8 single samples"):
        data_size(regression(5, 0)[0], 0.1)
