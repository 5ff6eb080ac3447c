"""Gradient noise: gradients of single samples, every subset, and leaving out one sample at a time."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import noise
from curvlens.results import Estimate, Status

LOSS = cl.losses.CrossEntropy()


def ragged(n: int = 6) -> tuple[Tensor, Tensor]:
    """Sequences with 1, 2, … labels that count."""
    return small.tokens_and_labels(n)


def even(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(7, (n, 6), generator=generator), torch.randint(7, (n, 6), generator=generator)


def of(data: Any, **options: Any) -> cl.Problem:
    return cl.Problem(small.gpt(), data, LOSS, **options)


def rows(data: tuple[Tensor, Tensor], keep: Any) -> tuple[Tensor, Tensor]:
    return data[0][list(keep)], data[1][list(keep)]


def gradients(problem: cl.Problem, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """∇S_i and c_i in plain torch."""
    found, counts = [], []
    for tokens, labels in zip(*data, strict=True):
        loss = nn.functional.cross_entropy(problem.model(tokens[None])[0], labels, reduction="sum")
        parts = torch.autograd.grad(loss, list(problem.model.parameters()))
        found.append(torch.cat([part.reshape(-1) for part in parts]))
        counts.append(float((labels != -100).sum()))
    return torch.stack(found), torch.tensor(counts, dtype=torch.float64)


def deviations(S: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """g and g_i − g."""
    g = S.sum(0) / c.sum()
    return g, len(c) / c.sum() * (S - c[:, None] * g)


@pytest.mark.parametrize("data", [ragged(), even()], ids=["ragged", "even"])
def test_against_gradients_of_single_samples(data: tuple[Tensor, Tensor]) -> None:
    problem = of(data)
    result = noise(problem)
    g, e = deviations(*gradients(problem, data))
    n = len(e)
    trace = e.square().sum() / (n - 1)
    assert abs(float(result.trace) - float(trace)) < 1e-12
    assert abs(float(result.gradient) - float(g @ g - trace / n)) < 1e-12
    for name, part in problem.blocks.split(e.T).items():
        assert abs(float(result.traces[name]) - float(part.square().sum() / (n - 1))) < 1e-12
        own = problem.blocks.split(g)[name].square().sum() - part.square().sum() / (n - 1) / n
        expected = float(part.square().sum() / (n - 1) / own) if own > 0 else math.nan
        assert math.isnan(expected) == math.isnan(float(result.scales[name]))
        assert math.isnan(expected) or abs(float(result.scales[name]) / expected - 1) < 1e-8
    assert abs(sum(float(x) for x in result.traces.values()) - float(result.trace)) < 1e-12
    assert (result.samples, result.each, result.size, result.status) == (n, "sample", 1.0, Status.SAMPLED)


def test_batching_changes_nothing() -> None:
    x, y = ragged()
    whole = noise(of((x, y)))
    parts = noise(of([(x[:2], y[:2]), (x[2:5], y[2:5]), (x[5:], y[5:])], micro_batch=2))
    assert abs(float(whole.trace) - float(parts.trace)) < 1e-12
    assert abs(float(whole.scale) - float(parts.scale)) < 1e-9 or math.isnan(float(whole.scale))
    assert abs(float(whole.trace.stderr) - float(parts.trace.stderr)) < 1e-12


def test_unbiased_over_all_subsets() -> None:
    """Both estimates from 3 of 6 samples are on average those from all 6: exactly so for equal token counts."""
    data = even()
    every = [noise(of(rows(data, keep))) for keep in combinations(range(6), 3)]
    whole = noise(of(data))
    for name in ("trace", "gradient"):
        mean = sum(float(getattr(one, name)) for one in every) / len(every)
        assert abs(mean - float(getattr(whole, name))) < 1e-12
    drawn = noise(of(data), samples=3, seed=2)
    assert drawn.samples == 3
    assert min(abs(float(drawn.trace) - float(one.trace)) for one in every) < 1e-12
    assert {round(float(noise(of(data), samples=3, seed=seed).trace), 9) for seed in range(4)} != {
        round(float(drawn.trace), 9)
    }


def jackknife(values: list[float]) -> float:
    x = torch.tensor(values, dtype=torch.float64)
    return float(((len(x) - 1) / len(x) * (x - x.mean()).square().sum()).sqrt())


@pytest.mark.parametrize("data", [ragged(), even()], ids=["ragged", "even"])
def test_errors_by_leaving_out_each_sample(data: tuple[Tensor, Tensor]) -> None:
    result = noise(of(data))
    without = [noise(of(rows(data, [j for j in range(6) if j != i]))) for i in range(6)]

    def close(estimate: Estimate, values: list[Estimate]) -> None:
        assert abs(float(estimate.stderr) - jackknife([float(v) for v in values])) < 1e-10

    close(result.trace, [one.trace for one in without])
    close(result.gradient, [one.gradient for one in without])
    for name in result.traces:
        close(result.traces[name], [one.traces[name] for one in without])
    if float(result.gradient) > 0:  # the ratio to first order
        B, q = float(result.scale), float(result.gradient)
        first = [(float(one.trace) - B * float(one.gradient)) / q for one in without]
        assert abs(float(result.scale.stderr) - jackknife(first)) < 1e-9


def signal() -> cl.Problem:
    """A clear gradient: a noise scale that is known."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return cl.Problem(model, (x, y), cl.losses.MSE())


def test_with_curvature() -> None:
    problem = signal()
    result = noise(problem, curvature=True)
    x, y = problem.data.first()
    G = -2 * y * x
    g, e = G.mean(0), G - G.mean(0)
    H = cl.hessian(problem).dense()
    trace = float((e @ H * e).sum() / 39)
    square = float(g @ H @ g) - trace / 40
    assert result.curvature_trace is not None
    assert result.curvature_gradient is not None
    assert result.curvature_scale is not None
    assert abs(float(result.curvature_trace) - trace) < 1e-10
    assert abs(float(result.curvature_gradient) - square) < 1e-10
    assert abs(float(result.curvature_scale) - trace / square) < 1e-10
    assert result.products == 42
    others = []
    for i in range(40):
        rest = torch.cat([G[:i], G[i + 1 :]])
        off = rest - rest.mean(0)
        others.append(float((off @ H * off).sum() / 38))
    assert abs(float(result.curvature_trace.stderr) - jackknife(others)) < 1e-10
    low, high = result.scale.interval()
    truth = float(e.square().sum() / 39 / (g @ g - e.square().sum() / 39 / 40))
    assert abs(float(result) - truth) < 1e-10
    assert low < truth < high
    assert noise(problem).curvature_scale is None


def test_gradients_of_several_samples() -> None:
    problem = signal()
    result = noise(problem, micro_batch=4)
    x, y = problem.data.first()
    G = (-2 * y * x).reshape(10, 4, 3).mean(1)
    trace = float((G - G.mean(0)).square().sum() / 9)
    assert abs(float(result.trace) - 4 * trace) < 1e-10
    assert abs(float(result.gradient) - (float(G.mean(0).square().sum()) - trace / 10)) < 1e-10
    assert (result.each, result.size, result.samples) == ("batch", 4.0, 10)


def test_batches_that_cannot_be_cut() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    data = [torch.randn(4, 3, dtype=torch.float64) for _ in range(5)]

    result = noise(coupled(model, data))
    assert (result.each, result.samples, result.size) == ("batch", 5, 4.0)


def coupled(model: nn.Module, data: list[Tensor]) -> cl.Problem:
    class Spread(cl.losses.Loss):
        couples_batch = True
        per_batch = True

        def sum_and_count(self, outputs: Any, batch: Any) -> tuple[Tensor, float]:
            return (outputs - outputs.mean(0)).square().sum() + outputs.square().sum(), 1.0

    return cl.Problem(model, data, Spread())


def test_a_gradient_of_nothing_but_noise() -> None:
    result = noise(small.problem())
    assert float(result.gradient) < 0
    assert math.isnan(float(result.scale))
    assert "cannot be told from 0" in result.scale.note
    assert result.table()[0]["scale"] is None
    assert "not known" in repr(result)


def test_a_budget_draws_fewer() -> None:
    problem = signal()
    calls = list[tuple[int, int | None]]()
    result = noise(problem, budget="1 gradients", progress=lambda done, total: calls.append((done, total)))
    assert result.samples == 20
    assert calls[-1] == (40, 40)
    assert result.status is Status.STOPPED_AT_BUDGET
    assert "20 of 40" in result.note
    assert noise(problem, budget="1h").status is Status.SAMPLED
    assert noise(problem, curvature=True, budget="30 gradients").samples == math.floor(26 / 2.05)


def test_bad_inputs() -> None:
    problem = signal()
    with pytest.raises(cl.CurvlensError, match="samples=0"):
        noise(problem, samples=0)
    with pytest.raises(cl.CurvlensError, match="need 3 sample gradients at least; there are 2"):
        noise(problem, samples=2)
    with pytest.raises(cl.CurvlensError, match=r"budget='0\.1 gradients' allows 2"):
        noise(problem, budget="0.1 gradients")
    with pytest.raises(cl.CurvlensError, match="expected a Problem"):
        noise(problem.model)  # type: ignore[arg-type]
    tokens, labels = even(4)
    labels[1:] = -100
    with pytest.raises(cl.CurvlensError, match="Fewer than two of the drawn samples"):
        noise(of((tokens, labels)))
