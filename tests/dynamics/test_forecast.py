"""Forecasts against torch's own optimisers, on quadratics exactly, and on a GPT until they part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import forecast
from curvlens.results import Status
from quadratics import frozen

Make = Callable[[Any], torch.optim.Optimizer]


def quadratic(seed: int = 0) -> cl.Problem:
    """A linear regression in 40 parameters, with curvatures from 0.01 to 10."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 0.5, 40, dtype=torch.float64)
    x = torch.randn(80, 40, generator=generator, dtype=torch.float64) * sizes
    y = torch.randn(80, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(40, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 40, generator=generator, dtype=torch.float64))
    return cl.Problem(model, (x, y), cl.losses.MSE())


def course(
    problem: cl.Problem, optimizer: torch.optim.Optimizer, steps: int, freeze: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Losses and distances of the optimiser itself, on the model itself."""
    x, y = problem.data.first()
    start = problem.theta
    losses, distances = [problem.loss()], [0.0]
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(problem.model(x), y).backward()  # type: ignore[no-untyped-call]
        freeze()
        optimizer.step()
        losses.append(problem.loss())
        distances.append(float((problem.theta - start).norm()))
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(distances, dtype=torch.float64)


SGD: dict[str, dict[str, Any]] = {
    "gradient descent": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9},
    "dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.4},
    "Nesterov": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "decay": {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1},
    "unstable": {"lr": 0.12},
}


@pytest.mark.parametrize("filled", [0, 5])
@pytest.mark.parametrize("name", SGD)
def test_sgd_on_a_quadratic(name: str, filled: int) -> None:
    """To 1e-10 for as many steps as products, from rest and with a filled buffer."""
    problem = quadratic()
    optimizer = torch.optim.SGD(problem.model.parameters(), **SGD[name])
    course(problem, optimizer, filled)
    found = forecast(problem, optimizer, 18, products=18)
    losses, distances = course(problem, optimizer, 18)
    torch.testing.assert_close(found.losses, losses, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.distances, distances, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.true_losses, losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.true_distances, distances, rtol=1e-10, atol=1e-12)
    assert found.exact == 18
    assert found.departure is None
    assert found.status is Status.COMPLETE


ADAPTIVE: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "Adam with decay": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02),
    "RMSprop with momentum": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.8),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_frozen_preconditioners_on_a_quadratic(name: str) -> None:
    """The real optimiser with its second moments held fixed after a long run."""
    problem = quadratic()
    optimizer = ADAPTIVE[name](problem.model.parameters())
    frozen(optimizer, 10**9)  # second moments of its own; no bias correction is left
    freeze = held(optimizer)
    course(problem, optimizer, 4, freeze)
    found = forecast(problem, optimizer, 15, products=15, check=0)
    losses, distances = course(problem, optimizer, 15, freeze)
    torch.testing.assert_close(found.losses, losses, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found.distances, distances, rtol=1e-8, atol=1e-12)
    assert len(found.true_losses) == 1


def held(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Hold the second moments where they are: take away before a step what the step will add."""
    kept: dict[tuple[Any, str], tuple[Tensor, Tensor]] = {
        (p, key): (state[key].clone(), state["step"].clone())
        for p, state in optimizer.state.items()
        for key in ("exp_avg_sq", "square_avg", "sum")
        if key in state
    }
    options = optimizer.param_groups[0]
    share = {"exp_avg_sq": options.get("betas", (0, 0))[1], "square_avg": options.get("alpha", 0.0)}

    def freeze() -> None:
        for (p, key), (value, step) in kept.items():
            coupled = 0.0 if options.get("decoupled_weight_decay") else options["weight_decay"]
            square = (p.grad + coupled * p.detach()).square()
            own = value - square if key == "sum" else (value - (1 - share[key]) * square) / share[key]
            optimizer.state[p][key].copy_(own)
            optimizer.state[p]["step"].copy_(step - 1)  # torch counts the step before it uses the number

    return freeze


def test_bias_correction() -> None:
    """Adam after three steps: its first moment is divided by 1 − β₁ᵗ, which changes from step to step."""
    problem, rate = quadratic(), 0.05
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=rate)
    course(problem, optimizer, 3)
    (state,) = optimizer.state.values()
    H, g = cl.hessian(problem).dense(), problem.gradient()
    P = (state["exp_avg_sq"].flatten() / (1 - 0.999**3)).sqrt() + 1e-8
    m, x = state["exp_avg"].flatten().clone(), torch.zeros_like(g)
    found = forecast(problem, optimizer, 12, products=12, check=0)
    for t in range(1, 13):
        m = 0.9 * m + 0.1 * (g + H @ x)
        x = x - rate * m / (1 - 0.9 ** (3 + t)) / P
        assert float(found.losses[t]) == pytest.approx(problem.loss() + float(g @ x + x @ H @ x / 2), rel=1e-9)
        assert float(found.distances[t]) == pytest.approx(float(x.norm()), rel=1e-9)


def test_more_steps_than_products() -> None:
    """Ritz values replace the spectrum: small errors, and said."""
    problem = quadratic()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.03, momentum=0.8)
    found = forecast(problem, optimizer, 200, products=30, check=0)
    losses, _ = course(problem, optimizer, 200)
    assert found.exact == 30
    torch.testing.assert_close(found.losses, losses, rtol=1e-3, atol=1e-6)


def test_the_whole_space() -> None:
    problem = quadratic()
    found = forecast(problem, cl.dynamics.SGD(0.03), 300, products=60, check=0)
    losses, _ = course(problem, torch.optim.SGD(problem.model.parameters(), lr=0.03), 300)
    torch.testing.assert_close(found.losses, losses, rtol=1e-9, atol=1e-12)


def test_a_network_departs() -> None:
    """On a GPT the forecast is right for small steps, and departs where the true loss is not quadratic."""
    problem = cl.Problem(small.gpt(), small.tokens_and_labels(6), cl.losses.CrossEntropy())
    before = problem.theta
    short = forecast(problem, cl.dynamics.SGD(1e-3), 10)
    assert short.departure is None
    assert float(short.losses[-1]) == pytest.approx(
        float(short.true_losses[-1]), abs=1e-2 * abs(float(short.losses[-1] - short.losses[0]))
    )
    sharp = float(cl.eigs(cl.hessian(problem), 1).values[-1])
    wild = forecast(problem, cl.dynamics.SGD(3 / sharp), 60)
    assert wild.departure is not None
    t = wild.departure
    largest = float((wild.losses[: t + 1] - wild.losses[0]).abs().max())
    assert abs(float(wild.losses[t] - wild.true_losses[t])) > 0.05 * largest
    assert torch.equal(problem.theta, before)


def test_bad_input() -> None:
    problem = quadratic()
    with pytest.raises(cl.CurvlensError, match="steps=0"):
        forecast(problem, cl.dynamics.SGD(0.1), 0)
    with pytest.raises(cl.CurvlensError, match=r"products=2\.5"):
        forecast(problem, cl.dynamics.SGD(0.1), 3, products=2.5)  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="no second moments yet"):
        forecast(problem, torch.optim.Adam(problem.model.parameters()), 3)
    with pytest.raises(cl.CurvlensError, match="batch=1000, but the data has 80 samples"):
        forecast(problem, cl.dynamics.SGD(0.1), 3, batch=1000)
    with pytest.raises(cl.CurvlensError, match="batch= knows SGD"):
        forecast(problem, cl.dynamics.Adam(1e-3), 3, batch=4)
    two = cl.Problem(small.gpt(), small.tokens_and_labels(2), cl.losses.CrossEntropy())
    parameters = list(two.model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:3], "momentum": 0.5}, {"params": parameters[3:]}]
    with pytest.raises(cl.CurvlensError, match="groups differ"):
        forecast(two, torch.optim.SGD(groups, lr=0.1, momentum=0.9), 3)


def test_parameters_of_different_age() -> None:
    """Steps of which no one function of H is made: bias corrections, and momentum that one parameter has not yet."""
    problem = cl.Problem(small.gpt(), small.tokens_and_labels(2), cl.losses.CrossEntropy())
    names, parameters = zip(*problem.model.named_parameters(), strict=True)

    def stepped(make: Make, later: bool) -> torch.optim.Optimizer:
        optimizer = make(problem.model)
        start = [p.detach().clone() for p in parameters]
        for first in (True, False):
            for p in parameters[1 if first and later else 0 :]:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for p, old in zip(parameters, start, strict=True):
                p.copy_(old)
        return optimizer

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    with pytest.raises(cl.CurvlensError, match="have taken 1 to 2 steps"):
        forecast(problem, stepped(adam, later=True), 2)
    assert forecast(problem, stepped(adam, later=False), 2, check=0).rule == "Adam"

    damped = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, dampening=0.5)
    for p in parameters[1:]:
        p.grad = torch.zeros_like(p)
    damped.step()
    with pytest.raises(cl.CurvlensError, match=f"'{names[0]}' of the optimiser have no momentum yet"):
        forecast(problem, damped, 2)


def test_fresh_and_described() -> None:
    """Second moments that were taken and not given are said; fresh=True is the description."""
    problem = quadratic()
    fresh = forecast(problem, torch.optim.Adam(problem.model.parameters(), lr=0.01), 5, fresh=True)
    described = forecast(problem, cl.dynamics.Adam(0.01), 5)
    torch.testing.assert_close(fresh.losses, described.losses)
    assert "taken as g²" in fresh.note
    assert "taken as g²" in described.note
    given = cl.dynamics.Adam(0.01, second_moment=problem.gradient().square())
    assert forecast(problem, given, 5).note == ""


def test_a_model_without_a_minimum_is_said() -> None:
    assert forecast(quadratic(), cl.dynamics.SGD(0.1), 50).note == ""  # convex
    gpt = cl.Problem(small.gpt(), small.tokens_and_labels(2), cl.losses.CrossEntropy())
    assert float(torch.linalg.eigvalsh(cl.hessian(gpt).dense())[0]) < 0
    found = forecast(gpt, cl.dynamics.SGD(20.0), 60, check=2)
    assert "has no minimum" in found.note
    assert "without limit" in repr(found)


def test_a_forecast_that_leaves_float64() -> None:
    found = forecast(quadratic(), cl.dynamics.SGD(50.0), 3000, check=2)
    assert not bool(found.losses.isnan().any())
    assert float(found.losses[-1]) == float(found.distances[-1]) == float("inf")
    assert "without limit, up beyond float64" in repr(found)
    assert found.departure is None  # the loss is quadratic
    far = forecast(quadratic(), cl.dynamics.SGD(1e200), 3, check=3)
    assert far.departure == 1


def test_groups_with_other_rates_and_decay() -> None:
    """Rates and decay in the gradient may differ: against dense algebra."""
    problem = cl.Problem(small.gpt(), small.tokens_and_labels(2), cl.losses.CrossEntropy())
    parameters = list(problem.model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:3], "lr": 0.5},
        {"params": parameters[3:], "weight_decay": 0.1},
    ]
    found = forecast(problem, torch.optim.SGD(groups, lr=0.1, momentum=0.7), 6, check=0)
    H, g, theta = cl.hessian(problem).dense(), problem.gradient(), problem.theta
    first = sum(p.numel() for p in parameters[:3])
    lr = torch.full_like(g, 0.1).index_fill(0, torch.arange(first), 0.5)
    decay = torch.full_like(g, 0.1).index_fill(0, torch.arange(first), 0.0)
    x, m = torch.zeros_like(g), torch.zeros_like(g)
    for t in range(1, 7):
        m = 0.7 * m + g + H @ x + decay * (theta + x)
        x = x - lr * m
        assert float(found.losses[t]) == pytest.approx(problem.loss() + float(g @ x + x @ H @ x / 2), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": True}], ids=str)
def test_the_mean_loss_with_noise(options: dict[str, Any]) -> None:
    """Against the covariance of the whole state, step by step, with dense matrices."""
    problem, rate, batch = quadratic(), 0.02, 4
    found = forecast(problem, cl.dynamics.SGD(rate, **options), 12, products=12, check=0, batch=batch, samples=80)
    x, y = problem.data.first()
    w = problem.theta
    each = 2 * (x @ w - y[:, 0])[:, None] * x
    noise = torch.cov(each.T) / batch
    H, n = cl.hessian(problem).dense(), len(w)
    beta, ahead = options.get("momentum", 0.0), options.get("nesterov", False)
    one, zero = torch.eye(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    into_m = torch.cat([H, beta * one], 1)  # of (x, m)
    into_x = -rate * (torch.cat([H, zero], 1) + beta * into_m if ahead else into_m)
    into_x = into_x + torch.cat([one, zero], 1)
    step = torch.cat([into_x, into_m])
    kick = torch.cat([-rate * (1 + beta if ahead else 1) * one, one])
    C = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    for t in range(1, 13):
        C = step @ C @ step.T + kick @ noise @ kick.T
        expected = float(found.losses[t]) + 0.5 * float((H * C[:n, :n]).sum())
        assert found.mean is not None
        assert found.mean_error is not None
        assert float(found.mean[t]) == pytest.approx(expected, rel=1e-9)
        assert float(found.mean_error[t]) > 0
    few = forecast(problem, cl.dynamics.SGD(rate, **options), 12, check=0, batch=batch, samples=20)
    assert few.mean is not None
    assert few.mean_error is not None
    assert found.mean is not None
    assert abs(float(few.mean[-1] - found.mean[-1])) < 4 * float(few.mean_error[-1])


def test_interrupted() -> None:
    problem = quadratic()

    def stop(done: int, total: int | None) -> None:
        if done == 25:
            raise KeyboardInterrupt

    found = forecast(problem, cl.dynamics.SGD(0.01), 20, products=20, progress=stop)
    assert found.status is Status.INTERRUPTED
    assert len(found.losses) == 21
    assert 1 < len(found.true_losses) < 21
    assert len(found.true_losses) == len(found.true_distances)


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # of low precision
@pytest.mark.parametrize("make", [lambda: cl.dynamics.SGD(1e-2, momentum=0.5), lambda: cl.dynamics.AdamW(1e-4)])
def test_in_float32(make: Callable[[], Any]) -> None:
    tokens = small.tokens_and_labels(6)
    exact = cl.Problem(small.gpt(), tokens, cl.losses.CrossEntropy())
    coarse = cl.Problem(small.gpt().float(), tokens, cl.losses.CrossEntropy())
    batch = 4 if isinstance(make(), cl.dynamics.SGD) else None
    one, other = (forecast(each, make(), 8, batch=batch, samples=4) for each in (exact, coarse))
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5)
    if batch:
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-3, atol=1e-4)


def test_at_a_minimum_nothing_moves() -> None:
    problem = quadratic()
    x, y = problem.data.first()
    with torch.no_grad():
        for p in problem.model.parameters():
            p.zero_()
    at = cl.Problem(problem.model, (x, 0 * y), cl.losses.MSE())
    found = forecast(at, cl.dynamics.SGD(0.1), 5)
    assert found.losses.tolist() == [0.0] * 6
    assert found.distances.tolist() == [0.0] * 6
