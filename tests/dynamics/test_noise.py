"""Gradient noise: gradients of single samples, every subset, and leaving out one sample at a time."""

from __future__ import annotations

import math
from importlib import import_module
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


@pytest.mark.parametrize("data", [ragged(), even()], ids=["ragged", "even"])
def test_curvature_by_block(data: tuple[Tensor, Tensor]) -> None:
    """Every block against gradients of single samples and the dense Hessian, cut to the block."""
    problem = of(data)
    result = noise(problem, curvature="block")
    g, e = deviations(*gradients(problem, data))
    H, n = cl.hessian(problem).dense(), len(e)
    assert result.gradients is not None
    assert result.curvature_traces is not None
    assert result.curvature_gradients is not None
    assert result.curvature_scales is not None
    places = problem.blocks.split(torch.arange(len(g)))
    assert set(places) == set(result.curvature_traces)
    for name, at in places.items():
        block, own, slope = H[at][:, at], e[:, at], g[at]
        trace = float(((own @ block) * own).sum()) / (n - 1)
        square = float(slope @ block @ slope) - trace / n
        assert float(result.curvature_traces[name]) == pytest.approx(trace, rel=1e-9, abs=1e-14)
        assert float(result.curvature_gradients[name]) == pytest.approx(square, rel=1e-9, abs=1e-14)
        plain = float(own.square().sum()) / (n - 1)
        assert float(result.gradients[name]) == pytest.approx(float(slope @ slope) - plain / n, rel=1e-9, abs=1e-14)
        if square > 0:
            assert float(result.curvature_scales[name]) == pytest.approx(trace / square, rel=1e-6)
        else:
            assert math.isnan(float(result.curvature_scales[name]))
            assert "or is negative" in result.curvature_scales[name].note
    whole = noise(problem, curvature=True)
    assert result.curvature_trace is not None
    assert whole.curvature_trace is not None
    assert float(result.curvature_trace) == pytest.approx(float(whole.curvature_trace), rel=1e-12)
    assert whole.curvature_traces is None
    assert sum(map(float, result.gradients.values())) == pytest.approx(float(result.gradient), rel=1e-9)
    # The blocks of H off the diagonal are in the whole only.
    assert abs(sum(map(float, result.curvature_traces.values())) / float(result.curvature_trace) - 1) > 1e-3
    assert result.products == (n + 2) * (1 + len(places))
    rows = {row["block"]: row for row in result.table()}
    name = next(iter(places))
    assert rows[name]["curvature_trace"] == float(result.curvature_traces[name])
    assert rows["all"]["curvature_trace_error"] == float(result.curvature_trace.stderr)
    assert {row["curvature_trace"] for row in noise(problem).table()} == {None}


def test_errors_by_block() -> None:
    """Leaving out each sample, with H held."""
    problem = of(even())
    result = noise(problem, curvature="block")
    S, c = gradients(problem, even())
    H = cl.hessian(problem).dense()
    assert result.curvature_traces is not None
    assert result.curvature_gradients is not None
    for name, at in problem.blocks.split(torch.arange(S.shape[1])).items():
        traces, squares = [], []
        for i in range(6):
            keep = [j for j in range(6) if j != i]
            g, e = deviations(S[keep], c[keep])
            block = H[at][:, at]
            traces.append(float(((e[:, at] @ block) * e[:, at]).sum()) / 4)
            squares.append(float(g[at] @ block @ g[at]) - traces[-1] / 5)
        assert float(result.curvature_traces[name].stderr) == pytest.approx(jackknife(traces), rel=1e-6, abs=1e-13)
        assert float(result.curvature_gradients[name].stderr) == pytest.approx(jackknife(squares), rel=1e-6, abs=1e-13)


def test_a_planted_fault_in_the_products_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 1.01 on products with blocks moves the numbers by block by so much, and no others."""
    problem = of(even())
    truth = noise(problem, curvature="block")
    module = import_module("curvlens.dynamics.noise")  # the function has its name
    times = module.Metric._times
    monkeypatch.setattr(module.Metric, "_times", lambda self, name, v: times(self, name, v) * (1.01 if name else 1.0))
    wrong = noise(problem, curvature="block")
    assert wrong.curvature_traces is not None
    assert truth.curvature_traces is not None
    for name, estimate in truth.curvature_traces.items():
        if abs(float(estimate)) > 1e-12:
            assert float(wrong.curvature_traces[name]) / float(estimate) == pytest.approx(1.01, rel=1e-9)
    assert float(wrong.curvature_trace) == pytest.approx(float(truth.curvature_trace), rel=1e-12)  # type: ignore[arg-type]


def population(size: int) -> tuple[cl.Problem, dict[str, float]]:
    """A small network on many samples, and the true numbers of all of them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(4, 1, generator=generator, dtype=torch.float64)).tanh()
    y = y + 0.3 * torch.randn(size, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(3)  # its gᵀHg is above 0, in all blocks too
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False)).double()
    problem = cl.Problem(model, (x, y), cl.losses.MSE())
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = (torch.func.functional_call(model, weights, (a[None],))[0] - b).square().mean()
        return found

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    G = torch.cat([part.detach().flatten(1) for part in rows.values()], 1)
    H = cl.hessian(problem).dense()
    g, e = G.mean(0), G - G.mean(0)
    truth = {"trace": float(e.square().sum() / (size - 1)), "gradient": float(g @ g)}
    truth |= {"curvature_trace": float(((e @ H) * e).sum() / (size - 1)), "curvature_gradient": float(g @ H @ g)}
    truth["scale"] = truth["trace"] / truth["gradient"]
    truth["curvature_scale"] = truth["curvature_trace"] / truth["curvature_gradient"]
    for name, at in problem.blocks.split(torch.arange(G.shape[1])).items():
        block, own, slope = H[at][:, at], e[:, at], g[at]
        truth[f"traces {name}"] = float(own.square().sum() / (size - 1))
        truth[f"gradients {name}"] = float(slope @ slope)
        truth[f"curvature_traces {name}"] = float(((own @ block) * own).sum() / (size - 1))
        truth[f"curvature_gradients {name}"] = float(slope @ block @ slope)
        truth[f"curvature_scales {name}"] = truth[f"curvature_traces {name}"] / truth[f"curvature_gradients {name}"]
    return problem, truth


def covered(size: int, draws: int, samples: int, curvature: Any) -> dict[str, int]:
    """How many of the intervals of 95 % contain the truth, for every number that is there."""
    problem, truth = population(size)
    counts = dict[str, int]()
    for seed in range(draws):
        result = noise(problem, samples=samples, curvature=curvature, seed=seed)
        for key, value in truth.items():
            field, _, name = key.partition(" ")
            found = getattr(result, field)
            if found is not None:
                low, high = (found[name] if name else found).interval()
                counts[key] = counts.get(key, 0) + bool(low <= value <= high)
    return counts


def test_intervals_cover_the_truth() -> None:
    """15 of 20: a coverage of 92 % gives fewer than that once in 100."""
    counts = covered(1500, 20, 50, curvature=True)
    assert len(counts) > 6
    assert min(counts.values()) >= 15, counts


@pytest.mark.full
def test_intervals_cover_the_truth_in_nine_of_ten() -> None:
    """Of 100 draws, for every number, by block too."""
    counts = covered(4000, 100, 200, curvature="block")
    assert len(counts) > 15
    assert min(counts.values()) >= 90, counts


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
    with pytest.raises(cl.CurvlensError, match="curvature='blocks', expected True, False or 'block'"):
        noise(problem, curvature="blocks")  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="expected a Problem"):
        noise(problem.model)  # type: ignore[arg-type]
    tokens, labels = even(4)
    labels[1:] = -100
    with pytest.raises(cl.CurvlensError, match="Fewer than two of the drawn samples"):
        noise(of((tokens, labels)))
