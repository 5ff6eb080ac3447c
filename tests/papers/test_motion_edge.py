"""The experiments on the edge of stability, forecasts and blocks, against independent truths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.learners import trained
from curvlens.papers.motion import step_edge


def small(seed: int = 0, samples: int = 8) -> cl.Problem:
    """A GPT of one layer that is to add."""
    task = Addition(digits=1)
    model = trained(task, seed=seed, steps=0, n_layer=1, d_model=4, d_mlp=8)
    return cl.Problem(model, [task.batch(samples, seed=seed)], cl.losses.CrossEntropy())


# step-edge


@pytest.fixture(scope="module")
def fitted() -> tuple[cl.Problem, list[Tensor]]:
    problem = small()
    return problem, step_edge.fitted(problem)


@pytest.mark.parametrize("rule", list(step_edge.RULES))
def test_a_displacement_follows_the_two_by_two_matrix(rule: str, fitted: tuple[cl.Problem, list[Tensor]]) -> None:
    """The component obeys δ' = δ − m', m' = βm + ηλδ, whose edge is 2(1+β) with β = 0 or 0.9."""
    problem, moments = fitted
    before = problem.theta.clone()
    beta = 0.0 if rule == "gd" else 0.9
    for target in (step_edge.BELOW, step_edge.ABOVE):
        found = step_edge.way(problem, rule, target, moments if rule == "adam" else None)
        c, m, rate = 1.0, 0.0, target * 2 * (1 + beta)
        for size in found[1:12]:
            m = beta * m + rate * c
            c -= m
            assert size == pytest.approx(abs(c), rel=0.02, abs=0.02)
        assert (max(found[-10:]) > 1) == (target > 1)
    assert bool((problem.theta == before).all())


def test_a_wrong_edge_is_seen(fitted: tuple[cl.Problem, list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sharpness that is 5 % too small, what should shrink grows."""
    problem, true = fitted[0], cl.stability

    class Wrong:
        def __init__(self, result: cl.results.Stability) -> None:
            self.ratio, self.direction = 0.95 * result.ratio, result.direction

    monkeypatch.setattr(cl, "stability", lambda *args, **options: Wrong(true(*args, **options)))
    assert max(step_edge.way(problem, "gd", step_edge.BELOW, None)[-10:]) > 1


def test_one_step_and_the_critical_rate() -> None:
    """Of a single step, from the dense Hessian and plain losses."""
    problem = small(samples=16)
    found = step_edge.single(problem)
    g, H = problem.gradient(), cl.hessian(problem).dense()
    assert found["edge"] == pytest.approx(2 / float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    assert found["model"] == pytest.approx(2 * float(g @ g) / float(g @ H @ g) / found["edge"], rel=1e-6)

    def loss(part: float) -> float:
        return problem.with_params(problem.theta - part * found["edge"] * g).loss()

    assert found["after"] == [pytest.approx(loss(part), rel=1e-12) for part in step_edge.FRACTIONS]
    low, high = found["critical"] / 1.06, found["critical"] * 1.06
    assert loss(low) < found["loss"] < loss(high)
