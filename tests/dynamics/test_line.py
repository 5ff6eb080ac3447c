"""The loss along a line: exact on a quadratic, and a radius that brute force confirms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import line
from curvlens.results import Line, Status
from quadratics import quadratic


def agrees(result: Line, loss: float, t: float) -> bool:
    """The definition, with a fine grid in the place of the closed form of the largest change."""
    s = torch.linspace(0, t, 2001, dtype=torch.float64)
    change = s * result.slope + s.square() * result.curvature / 2
    off = abs(loss - result.loss - float(change[-1]))
    return off <= 0.05 * max(float(change.abs().max()), result.floor)


def test_exact_on_a_quadratic() -> None:
    problem = quadratic()
    d = small.direction(5)
    result = line(problem, d)
    u = d / d.norm()
    H = cl.hessian(problem).dense()
    assert abs(result.slope - float(problem.gradient() @ u)) < 1e-12
    assert abs(result.curvature - float(u @ H @ u)) < 1e-12
    assert torch.allclose(result.losses, result.model, rtol=1e-10)
    assert result.forward_open
    assert result.backward_open
    assert result.status is Status.COMPLETE
    assert result.forward == result.backward == float(result.radii[-1])
    assert abs(result.norm - float(d.norm())) < 1e-12


@pytest.mark.parametrize("along", ["gradient", "random", "up"])
def test_the_radius_by_brute_force(along: str) -> None:
    problem = small.problem()
    g = problem.gradient()
    d = {"gradient": -g, "up": g, "random": small.direction(problem.layout.size)}[along]
    result = line(problem, d)
    assert result.status is Status.CONVERGED
    assert result.evaluations <= 24
    u, theta = d / d.norm(), problem.theta

    def loss(t: float) -> float:
        return problem.with_params(theta + t * u).loss()

    for side, radius in ((1, result.forward), (-1, result.backward)):
        for share in torch.linspace(0.02, 1, 30, dtype=torch.float64).tolist():
            t = side * share * radius
            assert agrees(result, loss(t), t)
        t = side * 1.0501 * radius
        assert not agrees(result, loss(t), t)
    for t, value, model in zip(result.radii.tolist(), result.losses.tolist(), result.model.tolist(), strict=True):
        assert abs(loss(t) - value) < 1e-12
        assert abs(result.loss + t * result.slope + t * t * result.curvature / 2 - model) < 1e-12


def test_what_is_known_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small.problem()
    g, d = problem.gradient(), small.direction(problem.layout.size)
    product = cl.hessian(problem) @ d
    expected = line(problem, d)
    loss = problem.loss()

    def forbidden(*_: object, **__: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(cl.Problem, "gradient", forbidden)
    monkeypatch.setattr("curvlens.operators.curvature.Curvature.apply", forbidden)
    for known in (
        line(problem, d, loss=loss, gradient=g, curvature=product),
        line(problem, problem.layout.unflatten(d), gradient=g, curvature=float(d @ product)),
        line(problem, d, loss=loss, gradient=float(g @ d), curvature=product),
    ):
        assert abs(known.forward / expected.forward - 1) < 1e-9
        assert abs(known.curvature - expected.curvature) < 1e-12
    assert line(problem, d, loss=loss, gradient=g, curvature=product).evaluations == expected.evaluations - 1


def test_given_radii() -> None:
    problem = small.problem()
    calls = list[tuple[int, int | None]]()
    d = small.direction(problem.layout.size)
    result = line(problem, d, radii=[1.0, 0.001, 0.01], progress=lambda done, total: calls.append((done, total)))
    assert result.radii.tolist() == [-1.0, -0.01, -0.001, 0.0, 0.001, 0.01, 1.0]
    assert result.status is Status.COMPLETE
    assert calls[-1] == (7, 7)
    losses = dict(zip(result.radii.tolist(), result.losses.tolist(), strict=True))
    for sign, radius in ((1, result.forward), (-1, result.backward)):
        well = [agrees(result, losses[sign * t], sign * t) for t in (0.001, 0.01, 1.0)]
        assert radius == ([0.0, 0.001, 0.01, 1.0][[*well, False].index(False)])


class Root(nn.Module):
    """√w: its loss is NaN for w < 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.sqrt()


def test_losses_that_are_not_finite() -> None:
    problem = cl.Problem(Root(), (torch.ones(2, 1).double(), torch.zeros(2, 1).double()), cl.losses.MSE())
    result = line(problem, torch.ones(1, dtype=torch.float64))  # the loss is w: linear, until it is NaN
    assert result.forward_open
    assert 0.94 < result.backward < 1
    assert math.isinf(float(result.losses[0]))
    assert result.table()[0]["loss"] is None
    result.plot()


def test_a_search_that_ends_early() -> None:
    problem = small.problem()
    d = small.direction(problem.layout.size)
    result = line(problem, d, evaluations=6)
    assert result.evaluations <= 6
    assert result.status is Status.STOPPED_AT_BUDGET
    assert "between" in result.note
    full = line(problem, d)
    assert result.forward <= full.forward * 1.05


def test_interrupted() -> None:
    problem = small.problem()

    def stop(done: int, total: int | None) -> None:
        if done == 4:
            raise KeyboardInterrupt

    result = line(problem, problem.gradient(), progress=stop)
    assert result.status is Status.INTERRUPTED
    assert len(result.radii) >= 3


def test_float32_knows_its_rounding() -> None:
    model = small.gpt().float()
    problem = cl.Problem(model, small.tokens_and_labels(), cl.losses.CrossEntropy())
    double = small.problem()
    d = small.direction(double.layout.size)
    with pytest.warns(cl.CurvlensWarning):
        result = line(problem, d.float())
    assert result.floor > 1e5 * line(double, d).floor
    assert abs(result.forward / line(double, d).forward - 1) < 0.2


@pytest.mark.parametrize("factor", [1e160, 1e-170])
def test_lengths_beyond_float64(factor: float) -> None:
    problem, u = quadratic(), torch.ones(5, dtype=torch.float64)
    for function in (line, cl.attribute):
        with pytest.raises(cl.CurvlensError, match=r"Scale it: direction / direction\.abs"):
            function(problem, factor * u)
    assert line(problem, 1e90 * u).curvature == pytest.approx(line(problem, u).curvature)


def test_bad_inputs() -> None:
    problem = quadratic()
    with pytest.raises(cl.CurvlensError, match="0 in every entry"):
        line(problem, torch.zeros(5))
    with pytest.raises(cl.CurvlensError, match=r"flat vector of 5 numbers .* got shape \(4,\)"):
        line(problem, torch.ones(4))
    with pytest.raises(cl.CurvlensError, match="NaN or infinite"):
        line(problem, torch.tensor([1.0, math.nan, 0, 0, 0]))
    with pytest.raises(cl.CurvlensError, match="positive numbers"):
        line(problem, torch.ones(5), radii=[-1.0])
    with pytest.raises(cl.CurvlensError, match="evaluations=2"):
        line(problem, torch.ones(5), evaluations=2)
    with pytest.raises(cl.CurvlensError, match="The gradient has to be"):
        line(problem, torch.ones(5), gradient=torch.ones(3))
    with pytest.raises(cl.CurvlensError, match="The loss at θ is nan"):
        line(problem, torch.ones(5), loss=math.nan)
