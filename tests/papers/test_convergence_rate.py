"""Rates of convergence by the spectrum: runs against plain linear algebra, and every outcome from made-up data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers import Effort, named
from curvlens.papers.learners import trained
from curvlens.papers.motion import convergence_rate
from curvlens.papers.motion.convergence_rate import RULES, alone, close, course, everywhere, power, states
from curvlens.report.drawing import draw
from test_verdicts import found, made


@pytest.mark.parametrize("rule", RULES)
def test_a_run_on_a_quadratic(rule: str) -> None:
    """Losses, gradients and parameters against powers of a matrix."""
    H = torch.diag(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    path = course(lambda: 0.5 * w @ H @ w, [w], 0.2, 0.1, rule, 12)
    bent = H + 0.1 * torch.eye(3, dtype=torch.float64)
    beta, nesterov = RULES[rule].get("momentum", 0.0), RULES[rule].get("nesterov", False)
    x, m = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in range(13):
        torch.testing.assert_close(path["parameters"][t], x, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(path["gradients"][t], bent @ x, rtol=1e-12, atol=1e-14)
        assert path["losses"][t] == pytest.approx(float(0.5 * x @ bent @ x), rel=1e-12)
        g = bent @ x
        m = beta * m + g
        x = x - 0.2 * (g + beta * m if nesterov else m)


def test_what_an_unembedding_reads() -> None:
    task = Addition(digits=2)
    model = trained(task, seed=0, steps=2)
    ids, _ = task.batch(4, seed=0)
    inputs = states(model, ids)
    assert list(inputs) == list(convergence_rate.DEPTHS)
    torch.testing.assert_close(inputs["inputs"], model.embed(ids) + model.pos.weight[: ids.shape[1]])
    torch.testing.assert_close(inputs["layer 2"], model.h[1](inputs["layer 1"]))
    torch.testing.assert_close(inputs["last norm"], model.final_norm(inputs["layer 2"]))
    torch.testing.assert_close(model.unembed(inputs["last norm"]), model(ids))


def test_an_unembedding_alone() -> None:
    """With weight decay c/κ and η = 1/c the spectrum at the end says the rate; curvature is nowhere above c."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=generator)
    run = alone(x, y, "gradient descent", 5.0, 400)
    bound = 0.5 * float(torch.linalg.eigvalsh(x.T @ x / 60)[-1])
    decay, rate = bound / 5, 1 / (1.2 * bound)
    w = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(3000):
        p = (x @ w.T).softmax(1)
        w = w - rate * ((p - torch.eye(3, dtype=torch.float64)[y]).T @ x / 60 + decay * w)
    model = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(w)
    values = torch.linalg.eigvalsh(cl.hessian(cl.Problem(model, (x, y), cl.losses.CrossEntropy())).dense()) + decay
    assert float(values[-1]) < bound + decay
    curved = values[values > decay * (1 + 1e-9)]  # without shifts of all logits
    assert len(curved) == 6
    assert run["condition"] == pytest.approx(float(curved[-1] / curved[0]), rel=1e-6)
    assert run["predicted"] == pytest.approx(1 - rate * float(curved[0]), rel=1e-9)
    assert close(run)


def test_all_weights_come_back() -> None:
    """A run leaves the model where it was, and its loss falls with a small learning rate."""
    task = Addition(digits=2)
    model = trained(task, seed=0, steps=5, n_layer=1, d_model=4, d_mlp=4)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    run = everywhere(model, task.batch(6, seed=1), "gradient descent", 24)
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), before)
    assert run["fallen"][0] > 0
    assert run["ahead"] == 6


def made_up(
    decay: float = 1.0, free: float = 1.0, everywhere: float = 1.0, departure: int | None = None, grows: float = 1.0
) -> Any:
    """Logarithms of the rates seen, over those predicted; and the power of the condition number."""

    def run(rule: str, predicted: float, over: float, **more: Any) -> dict[str, Any]:
        seen = predicted**over
        return {
            "rule": rule,
            "seen": seen,
            "low": seen**1.001,
            "high": seen**0.999,
            "predicted": predicted,
            "slowest": 0.1,
            "steps": [0, 1],
            "gradients": [1.0, 0.5],
            **more,
        }

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        wobble = math.exp(0.01 * math.sin(5 * c["seed"]))
        if c["part"] == "all weights":
            more = {"bottom": -0.1, "departure": departure, "ahead": 10, "fallen": [0.1, 0.1]}
            return {"runs": [run(rule, 0.99, everywhere, **more) for rule in ("gradient descent", "heavy ball")]}
        runs = [
            run(rule, math.exp(-wobble * k ** (-grows) / decay), decay, decay=True, condition=k)
            for rule in RULES
            for k in (10.0, 30.0, 100.0)
        ]
        for depth, k in zip(convergence_rate.DEPTHS, (1e3, 1e4, 1e5, 1e6), strict=True):
            predicted = math.exp(-wobble * 1e-3 * k ** (-grows) / free)
            runs.append(run("gradient descent", predicted, free, decay=False, condition=k, depth=depth))
        return {"runs": runs}

    return make


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "holds"),
        ({"free": 3.0}, "holds when"),
        ({"everywhere": 3.0}, "holds when"),
        ({"decay": 3.0, "free": 3.0, "everywhere": 0.3, "departure": 2}, "does not hold"),
    ],
)
def test_rates_by_the_spectrum(options: dict[str, Any], said: str) -> None:
    finding = found("convergence-rate", "convergence-rate", made_up(**options), seeds=3)
    assert finding.verdict == said
    if options == {"free": 3.0}:
        assert "without decay" not in finding.regime
        assert "seen over predicted 3 to 3, close in 0 of 12 runs" in finding.measured


def test_growth_is_no_rate() -> None:
    """Negative curvature predicts growth; a gradient that shrinks refutes it, whatever its rate."""

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        result = made_up()(c)
        if c["part"] == "all weights":
            for run in result["runs"]:
                run["predicted"] = 1.02
        return dict(result)

    finding = found("convergence-rate", "convergence-rate", make, seeds=3)
    assert finding.verdict == "holds when"
    assert "all weights, heavy ball: no fall is predicted, close in 0 of 3 runs" in finding.measured


@pytest.mark.parametrize(("grows", "said"), [(1.0, "holds"), (0.0, "does not hold"), (-0.5, "does not hold")])
def test_conditioning(grows: float, said: str) -> None:
    assert found("convergence-rate", "conditioning-speed", made_up(grows=grows), seeds=3).verdict == said


def test_one_seed_decides_nothing_and_draws() -> None:
    for claim in ("convergence-rate", "conditioning-speed"):
        assert found("convergence-rate", claim, made_up(), seeds=1).verdict == "undecided"
    experiment = named("convergence-rate")
    for chart in experiment.report(made(experiment, made_up(), Effort(quick=True, seeds=2))).charts:
        draw(chart)


def test_a_seed_that_differs_leaves_it_open() -> None:
    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        return dict(made_up(departure=3 if c["seed"] == 1 else None)(c))

    finding = found("convergence-rate", "convergence-rate", make, seeds=3)
    assert finding.verdict == "holds when"
    assert "Undecided: all weights, gradient descent, all of the quadratic model" in finding.measured


def test_a_planted_fault_is_seen() -> None:
    """The power is of the time: of the rate itself, or of its inverse logarithm with a wrong sign, it is another."""
    runs = [[{"condition": k, "seen": math.exp(-1 / k)} for k in (10.0, 100.0, 1000.0)]] * 3
    assert power(runs).value == pytest.approx(1.0, rel=1e-9)
    squared = [[{"condition": k, "seen": math.exp(-1 / k**0.5)} for k in (10.0, 100.0, 1000.0)]] * 3
    assert power(squared).value == pytest.approx(0.5, rel=1e-9)
