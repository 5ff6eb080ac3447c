"""The experiments on the edge of stability, forecasts and blocks, against independent truths."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.draws import stream
from curvlens.papers.learners import trained
from curvlens.papers.motion import (
    adam_edge,
    block_heterogeneity,
    block_order,
    forecast_departure,
    ggn_top_training,
    recommendations,
    step_edge,
)


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


# adam-edge


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTs of one layer on few samples."""
    for module in (adam_edge, recommendations):
        monkeypatch.setattr(module, "trained", partial(trained, n_layer=1, d_model=4, d_mlp=8))
        monkeypatch.setattr(module, "SAMPLES", 8)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("rule", ["adam", "gd"])
def test_the_fraction_of_the_edge_is_that_of_the_dense_hessian(rule: str) -> None:
    """After three steps of the rule as the textbooks write it, with the eigenvalues of the whole matrix."""
    lr, task = 1e-3, Addition(digits=2)
    found = adam_edge.measure({"rule": rule, "lr": lr, "steps": 3, "every": 3, "seed": 1})
    model = trained(task, seed=1, steps=0, n_layer=1, d_model=4, d_mlp=8)
    problem = cl.Problem(model, [task.batch(8, seed=stream(1, "sequences"))], cl.losses.CrossEntropy())
    theta, m, v = problem.theta.clone(), torch.zeros_like(problem.theta), torch.zeros_like(problem.theta)
    for t in range(1, 4):
        g = problem.with_params(theta).gradient()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        P = (v / (1 - 0.999**t)).sqrt() + 1e-8
        theta = theta - (lr * m / (1 - 0.9**t) / P if rule == "adam" else lr * g)
    at = problem.with_params(theta)
    H = cl.hessian(at).dense()
    edge = lr / 2
    if rule == "adam":
        H = H / P.sqrt() / P.sqrt()[:, None]
        edge = lr / (1 - 0.9**3) / 38
    assert found["loss"] == [pytest.approx(at.loss(), rel=1e-9)]
    assert found["ratio"] == [pytest.approx(float(torch.linalg.eigvalsh(H)[-1]) * edge, rel=adam_edge.TOLERANCE)]


# recommendations


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("rule", ["momentum", "clip", "layers"])
def test_steps_of_a_rule_are_those_of_the_textbooks(rule: str) -> None:
    """Three steps by hand; step sizes of layers from the dense blocks of the Hessian."""
    config, lr, task = {"rule": rule, "steps": 3, "seed": 2}, 0.05, Addition(digits=2)
    model = trained(task, seed=2, steps=0, n_layer=1, d_model=4, d_mlp=8)

    def problem(purpose: str, size: int = 8) -> cl.Problem:
        return cl.Problem(model, [task.batch(size, seed=stream(2, purpose))], cl.losses.CrossEntropy())

    at = problem("curvature 0")
    eta, sizes = torch.full_like(at.theta, lr), None
    if rule == "layers":
        H = cl.hessian(at).dense()
        sizes = recommendations.curvature(model, "layer", config, 0)
        for place, found in zip(["embed", "pos", "h.0", "final_norm", "unembed"], sizes, strict=True):
            of = [torch.arange(s.start, s.stop) for name, s in at.layout.slices.items() if name.startswith(place)]
            own = torch.cat(of)
            size = float(torch.linalg.matrix_norm(H[own][:, own], 2))
            assert found == pytest.approx(size, rel=0.05)
            eta[own] = lr / found
    theta, m = at.theta.clone(), torch.zeros_like(at.theta)
    for step in range(3):
        g = problem(f"step {step}").with_params(theta).gradient()
        m = 0.9 * m + g if rule == "momentum" else g / max(1.0, float(g.norm())) if rule == "clip" else g
        theta = theta - eta * m
    expected = problem("test", recommendations.TEST).with_params(theta).loss()
    assert recommendations.after(config, lr, sizes) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("tiny")
def test_a_run_that_diverges_has_no_loss() -> None:
    assert recommendations.after({"rule": "sgd", "steps": 20, "seed": 0}, 1e200, None) == math.inf


# block-order and block-heterogeneity


@pytest.mark.full
def test_mean_curvatures_are_those_of_the_differentiated_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_order, "trained", partial(trained, d_model=4, d_mlp=8))
    monkeypatch.setattr(block_order, "SAMPLES", 4)
    found = block_order.measure({"steps": 0, "seed": 3})
    task = Addition(digits=2)
    model = trained(task, seed=3, steps=0, d_model=4, d_mlp=8)
    problem = cl.Problem(model, [task.batch(4, seed=0)], cl.losses.CrossEntropy())
    roles = {"Emb": r"^embed", "QK": r"\.(q|k)\.", "FFN": r"mlp", "VO": r"\.(v|o)\.", "Norm": r"norm"}
    for part, operator in (("H", cl.hessian(problem)), ("G", cl.ggn(problem))):
        diagonal = problem.layout.unflatten(operator.dense().diagonal().clone())
        for role, pattern in roles.items():
            own = torch.cat([v.flatten() for name, v in diagonal.items() if re.search(pattern, name)])
            assert found[part][role] == pytest.approx(float(own.mean()), rel=1e-8)


def test_the_distance_of_shares_is_that_of_the_books() -> None:
    """½ D(p‖m) + ½ D(q‖m) in bits, under a root."""
    half, one, other = (torch.tensor(x, dtype=torch.float64) for x in ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0)))
    assert block_heterogeneity.distance(one, one) == 0
    assert block_heterogeneity.distance(one, other) == pytest.approx(1)
    expected = math.sqrt(0.5 * math.log2(1 / 0.75) + 0.5 * (0.5 * math.log2(0.5 / 0.75) + 0.5 * math.log2(0.5 / 0.25)))
    assert block_heterogeneity.distance(one, half) == pytest.approx(expected)


def test_scales_of_spectra_count_in_one_reading_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(40, dtype=torch.float64, generator=generator)
    assert block_heterogeneity.distances([one, one], "scales") < 1e-7
    assert block_heterogeneity.distances([one, 1e-4 * one], "shapes") < 1e-7
    assert block_heterogeneity.distances([one, 1e-4 * one], "scales") > 0.9
    assert block_heterogeneity.distances([one, -one.abs()], "shapes") > 0.4  # the sign counts


def test_networks_are_trained_to_half_of_their_loss() -> None:
    for kind in block_heterogeneity.NETWORKS:
        start, _, _ = block_heterogeneity.network({"network": kind, "stage": "start", "seed": 0})
        model, (x, y), steps = block_heterogeneity.network({"network": kind, "stage": "half", "seed": 0})
        assert 50 < steps < block_heterogeneity.MOST
        losses = [float(F.cross_entropy(net(x).flatten(0, -2), y.flatten()).detach()) for net in (start, model)]
        assert 0.3 < losses[1] / losses[0] < 0.7


# forecast-departure and ggn-top-training


def test_forecasts_depart_where_those_of_the_dense_hessian_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient descent and momentum on the dense quadratic model and on the loss, step by step."""
    monkeypatch.setattr(forecast_departure, "trained", partial(trained, n_layer=1, d_model=4, d_mlp=8))
    monkeypatch.setattr(forecast_departure, "STATES", {"learning": (20, 8)})
    monkeypatch.setattr(forecast_departure, "RULES", {"gd": "", "momentum": ""})
    steps = 12
    found = forecast_departure.measure({"state": "learning", "steps": steps, "seed": 1})
    task = Addition(digits=2)
    model = trained(task, seed=1, steps=0, n_layer=1, d_model=4, d_mlp=8)
    problem = cl.Problem(model, [task.batch(8, seed=stream(1, "sequences"))], cl.losses.CrossEntropy())
    step_edge.fitted(problem, 20)
    g, H, loss = problem.gradient(), cl.hessian(problem).dense(), problem.loss()
    top = float(torch.linalg.eigvalsh(H)[-1])

    def run(beta: float, lr: float, quadratic: bool) -> list[float]:
        x, m, losses = torch.zeros_like(g), torch.zeros_like(g), [loss]
        for _ in range(steps):
            m = beta * m + (g + H @ x if quadratic else problem.with_params(problem.theta + x).gradient())
            x = x - lr * m
            losses.append(
                float(loss + g @ x + 0.5 * x @ H @ x) if quadratic else problem.with_params(problem.theta + x).loss()
            )
        return losses

    for rule, beta in (("gd", 0.0), ("momentum", 0.9)):
        for fraction in forecast_departure.FRACTIONS:
            lr = fraction * 2 * (1 + beta) / top
            model_losses, true = run(beta, lr, True), run(beta, lr, False)
            change = [max(abs(each - loss) for each in model_losses[: t + 1]) for t in range(steps + 1)]
            gap = [abs(a - b) / c for a, b, c in zip(true[1:], model_losses[1:], change[1:], strict=True)]
            own = found[f"{rule} {fraction:g}"]
            shown = [gap[t - 1] for t in forecast_departure.SHOWN if t <= steps]
            assert own["gap"] == [pytest.approx(each, rel=0.02) for each in shown]
            left = [t + 1 for t, each in enumerate(gap) if each > forecast_departure.AGREEMENT]
            assert own["departure"] == (left[0] if left else None)


def test_largest_eigenvalues_are_those_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggn_top_training, "trained", partial(trained, d_model=4, d_mlp=8))
    monkeypatch.setattr(ggn_top_training, "SAMPLES", 4)
    found = ggn_top_training.measure({"steps": 3, "seed": 3})
    task = Addition(digits=2)
    model = trained(task, seed=3, steps=3, d_model=4, d_mlp=8)
    problem = cl.Problem(model, [task.batch(4, seed=0)], cl.losses.CrossEntropy())
    H, G = (cl.eigs(make(problem), 1) for make in (cl.hessian, cl.ggn))
    assert found["H"] == pytest.approx(float(H.values[0]), rel=1e-8)
    assert found["G"] == pytest.approx(float(G.values[0]), rel=1e-8)
    assert found["overlap"] == pytest.approx(float(H.vectors[:, 0] @ G.vectors[:, 0]) ** 2, rel=1e-5)
