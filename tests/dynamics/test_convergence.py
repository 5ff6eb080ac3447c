"""Convergence: quadratics whose rate and curvature are known, real runs of torch's SGD, noise with a memory."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.dynamics import convergence, rates
from curvlens.results import Convergence

EIGENVALUES = torch.tensor([0.1, 0.7, 2.0, 5.0], dtype=torch.float64)


def basis(n: int = 4) -> Tensor:
    Q: Tensor = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    return Q


def run(values: Tensor, steps: int, seed: int = 0, offset: float = 0.0, **options: Any) -> dict[str, Tensor]:
    """torch's SGD on ½ wᵀHw + offset: losses, gradients and parameters before each step and after the last."""
    Q = basis(len(values))
    H = Q @ torch.diag(values) @ Q.T
    w = torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.SGD([w], **options)
    losses, gradients, parameters = [], [], []
    for t in range(steps + 1):
        optimizer.zero_grad()
        loss = 0.5 * w @ H @ w + offset
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        losses.append(float(loss.detach()))
        gradients.append(w.grad.clone())
        parameters.append(w.detach().clone())
        if t < steps:
            optimizer.step()
    found = {"losses": torch.tensor(losses, dtype=torch.float64), "H": H}
    return found | {"gradients": torch.stack(gradients), "parameters": torch.stack(parameters)}


def along(H: Tensor, d: Tensor) -> Tensor:
    return ((d @ H) * d).sum(1) / d.square().sum(1)


def test_curvature_of_gradient_descent() -> None:
    course = run(EIGENVALUES, 40, lr=0.15)
    g = course["gradients"]
    truth = along(course["H"], g[:-1])
    by_norm = convergence(course["losses"], g.norm(dim=1), learning_rate=0.15)
    by_vector = convergence(course["losses"].tolist(), list(g), learning_rate=0.15)
    with_points = convergence(course["losses"], g, parameters=course["parameters"], learning_rate=0.15)
    for found in (by_norm, by_vector, with_points):
        torch.testing.assert_close(found.curvature, truth, rtol=1e-10, atol=0)
        assert bool(((found.curvature - truth).abs() <= found.curvature_error).all())
        assert found.note == ""
    torch.testing.assert_close(by_vector.secant, truth, rtol=1e-10, atol=0)
    torch.testing.assert_close(with_points.secant, truth, rtol=1e-10, atol=0)
    assert len(by_norm.secant) == 0
    assert by_norm.curvature[-1] < by_norm.curvature[0]


def test_losses_of_a_log() -> None:
    """Rounded to six decimals: the errors say so, and what is left of the curvature is right."""
    exact = [0.3 * 0.97 ** (2 * t) for t in range(60)]
    norms = [math.sqrt(2 * x) for x in exact]  # the loss is w²/2, η = 0.03
    found = convergence([round(x, 6) for x in exact], norms, learning_rate=0.03)
    off = (found.curvature - 1).abs()
    assert bool((off <= found.curvature_error).all())
    assert float(off.max()) > 0.01
    assert float(convergence(exact, norms, learning_rate=0.03).curvature_error.max()) < 1e-9
    with pytest.raises(cl.CurvlensError, match="expected numbers"):
        convergence(torch.ones(9, dtype=torch.complex128), learning_rate=0.1)
    large = convergence([1.0, 0.9, 0.8], 1e200 * torch.ones(3, 4, dtype=torch.float64), learning_rate=0.1)
    assert bool(large.gradients.isfinite().all())


@pytest.mark.parametrize("part", ["slope", "square", "bend"])
def test_a_planted_fault_in_the_curvature_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 1.01 on gᵀd, on ‖d‖² or on dᵀ(g' − g) moves the curvature away from the truth."""
    course = run(EIGENVALUES, 40, lr=0.15)
    truth = along(course["H"], course["gradients"][:-1])
    module = import_module("curvlens.dynamics.convergence")  # the function has its name
    true = module._steps

    def faulty(*given: Any) -> Any:
        steps = true(*given)
        return replace(steps, **{part: 1.01 * getattr(steps, part)})

    monkeypatch.setattr(module, "_steps", faulty)
    wrong = convergence(course["losses"], course["gradients"], learning_rate=0.15)
    found = wrong.secant if part == "bend" else wrong.curvature
    assert float((found / truth - 1).abs().min()) > 5e-3


RULES: dict[str, dict[str, Any]] = {
    "gradient descent": {"learning_rate": 0.3},
    "beyond the middle": {"learning_rate": 0.398},
    "heavy ball": {"learning_rate": 0.1, "momentum": 0.5},
    "heavy ball, complex": {"learning_rate": 0.3, "momentum": 0.9},
    "Nesterov": {"learning_rate": 0.2, "momentum": 0.6, "nesterov": True},
    "Nesterov, complex": {"learning_rate": 0.2, "momentum": 0.95, "nesterov": True},
}


def options(rule: dict[str, Any]) -> dict[str, Any]:
    return {"lr" if name == "learning_rate" else name: value for name, value in rule.items()}


def stepped(value: float, w: float, buffer: float, rule: dict[str, Any]) -> Tensor:
    """Position and buffer after a step of torch's SGD on ½ value w²."""
    x = torch.tensor([w], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], **options(rule))
    optimizer.state[x]["momentum_buffer"] = torch.tensor([buffer], dtype=torch.float64)
    (0.5 * value * x.square()).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    after = optimizer.state[x]["momentum_buffer"] if rule.get("momentum") else torch.zeros(1, dtype=torch.float64)
    return torch.cat([x.detach(), after])


@pytest.mark.parametrize("name", RULES)
def test_the_factor_of_each_eigenvector(name: str) -> None:
    """Against the matrix of a step of torch's SGD, column by column."""
    rule = RULES[name]
    for value in [*EIGENVALUES.tolist(), -0.4]:
        step = torch.stack([stepped(value, 1.0, 0.0, rule), stepped(value, 0.0, 1.0, rule)], 1)
        truth = float(torch.linalg.eigvals(step).abs().max())
        found = float(rates.factors(torch.tensor([value], dtype=torch.float64), *rule.values())[0])
        assert found == pytest.approx(truth, rel=1e-7, abs=1e-7), value  # a double eigenvalue: √eps


@pytest.mark.parametrize("name", RULES)
def test_predicted_and_seen(name: str) -> None:
    rule = RULES[name]
    course = run(EIGENVALUES, 400, **options(rule))
    found = convergence(
        course["losses"], course["gradients"], parameters=course["parameters"], spectrum=EIGENVALUES, **rule
    )
    truth = max(float(x) for x in rates.factors(EIGENVALUES, *rule.values()))
    assert found.predicted == pytest.approx(truth, rel=1e-12)
    complex_pair = "complex" in name
    assert float(found.rate) == pytest.approx(truth, rel=2e-3 if complex_pair else 1e-6)
    d = course["parameters"].diff(dim=0)
    kept = found.curvature_error < 1e-3 * found.curvature
    assert int(kept.sum()) > 20
    torch.testing.assert_close(found.curvature[kept], along(course["H"], d)[kept], rtol=2e-3, atol=0)


def test_a_rule_with_a_fault_is_told_from_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted factor of 2 at η the prediction no longer agrees with the run."""
    rule = RULES["heavy ball"]
    course = run(EIGENVALUES, 400, **options(rule))

    def agrees() -> bool:
        found = convergence(course["losses"], course["gradients"], spectrum=EIGENVALUES, **rule)
        assert found.predicted is not None
        return abs(found.predicted / float(found.rate) - 1) < 1e-6

    assert agrees()
    true = rates.factors
    module = import_module("curvlens.dynamics.convergence")
    monkeypatch.setattr(module, "factors", lambda values, rate, *rest: true(values, 2 * rate, *rest))
    assert not agrees()


def test_two_ends_are_enough() -> None:
    """The slowest factor of a range of curvatures is at an end of it."""
    for rule in RULES.values():
        for low, high in ((0.01, 0.5), (0.3, 4.0), (0.001, 6.0)):
            every = torch.linspace(low, high, 500, dtype=torch.float64)
            ends = rates.factors(every[[0, -1]], *rule.values()).max()
            assert float(rates.factors(every, *rule.values()).max()) == pytest.approx(float(ends), rel=1e-12)


def test_the_kernel_does_not_count() -> None:
    """A gradient has no part along eigenvalues that are 0."""
    values = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    course = run(values, 100, lr=0.3)
    found = convergence(course["losses"], course["gradients"], learning_rate=0.3, spectrum=values)
    assert found.predicted == pytest.approx(0.85, rel=1e-12)
    assert float(found.rate) == pytest.approx(0.85, rel=1e-9)
    assert float(found.condition[0]) == pytest.approx(4.0)


def test_results_as_spectra() -> None:
    problem = small.problem()
    H = cl.hessian(problem)
    both, density = cl.eigs(H, 3, ends="both"), cl.density(H)
    losses = [1.0 / (t + 1) for t in range(40)]
    found = convergence(losses, learning_rate=0.01, spectrum=both)
    sizes = both.values.abs()
    assert float(found.condition[0]) == pytest.approx(float(sizes.max() / sizes.min()))
    assert "eigenvectors that were computed" in found.subspace
    assert "below 0" in found.note
    named = convergence(losses, learning_rate=0.01, spectrum=density, subspace="all parameters")
    assert named.subspace == "all parameters"
    assert named.predicted is not None
    assert float(named.largest[0]) == pytest.approx(float(density.nodes.abs().max()))


def test_condition_numbers_over_steps() -> None:
    losses = [1.0 / (t + 1) for t in range(40)]
    found = convergence(losses, learning_rate=0.1, spectrum={20: [1.0, 8.0], 0: [1.0, -4.0], 39: [2.0, 3.0, 0.0]})
    assert found.spectrum_steps.tolist() == [0, 20, 39]
    assert found.condition.tolist() == [4.0, 8.0, 1.5]
    assert found.predicted == pytest.approx(0.8)  # by the last one
    assert found.slowest == 2.0
    assert [row["condition"] for row in found.table()][20] == 8.0


def test_without_gradients() -> None:
    """The loss falls at the square of the rate."""
    course = run(EIGENVALUES, 150, offset=1.0, lr=0.15)
    found = convergence(course["losses"], learning_rate=0.15, spectrum=EIGENVALUES)
    assert found.of == "decrements"
    assert float(found.rate) == pytest.approx(1 - 0.015, rel=1e-6)
    assert len(found.curvature) == 0
    assert "needs gradients" in found.note
    longer = run(EIGENVALUES, 3000, offset=1.0, lr=0.15)
    late = convergence(longer["losses"], learning_rate=0.15)
    assert "the change of the loss is 0 up to rounding" in late.note
    assert late.window[1] < 1500
    assert "rose" not in late.note  # by no more than rounding
    assert float(late.rate) == pytest.approx(1 - 0.015, rel=1e-2)


def test_gradients_at_the_floor_of_rounding() -> None:
    """What is left when a gradient has vanished in rounding is no rate."""
    noise = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = 0.9 ** torch.arange(400, dtype=torch.float64) + 1e-16 * (1 + noise)
    losses = 1 + g.square() / 2
    found = convergence(losses, g, learning_rate=0.1, spectrum=[1.0])
    assert float(found.rate) == pytest.approx(0.9, rel=1e-3)
    assert found.agrees
    assert found.window[1] < 320
    assert "‖g‖ is 0 up to rounding" in found.note
    narrow = convergence(losses, g.float(), learning_rate=0.1)
    assert narrow.window[1] < 130


def test_momentum_without_parameters() -> None:
    course = run(EIGENVALUES, 100, lr=0.1, momentum=0.5)
    found = convergence(course["losses"], course["gradients"], learning_rate=0.1, momentum=0.5)
    assert len(found.curvature) == 0
    assert "momentum does not step along the gradient" in found.note
    assert math.isfinite(float(found.rate))


def test_steps_that_are_not_the_gradients() -> None:
    course = run(EIGENVALUES, 60, lr=0.1)
    found = convergence(course["losses"], course["gradients"], parameters=course["parameters"], learning_rate=0.12)
    assert "60 of 60 steps are not −η times the gradient" in found.note
    torch.testing.assert_close(
        found.curvature, along(course["H"], course["parameters"].diff(dim=0)), rtol=1e-9, atol=0
    )  # of the steps taken


def test_rising_losses() -> None:
    course = run(EIGENVALUES, 40, lr=0.42)
    found = convergence(course["losses"], course["gradients"], learning_rate=0.42, spectrum=EIGENVALUES)
    assert "the loss rose in" in found.note
    assert found.predicted == pytest.approx(1.1)
    assert float(found.rate) > 1
    assert float(found.curvature[-1]) > 2 / 0.42
    rising = run(EIGENVALUES, 40, lr=0.8, momentum=0.3)
    late = convergence(rising["losses"], rising["gradients"], learning_rate=0.8, momentum=0.3)
    assert "the last loss is above the first" in late.note


def test_rounding_of_losses() -> None:
    """float32 losses are told by their digits, and the error of the curvature says so."""
    course = run(EIGENVALUES, 60, offset=3.0, lr=0.15)
    truth = along(course["H"], course["gradients"][:-1])
    norms = course["gradients"].norm(dim=1)
    found = convergence(course["losses"].float().tolist(), norms, learning_rate=0.15)
    assert bool(((found.curvature - truth).abs() <= found.curvature_error).all())
    assert float(found.curvature_error[-1]) > 1e-3
    exact = convergence(course["losses"], norms, learning_rate=0.15)
    assert bool((exact.curvature_error < 1e-6 * found.curvature_error).all())
    assert {t for t, _ in found.shown_curvature()} < {t for t, _ in exact.shown_curvature()}


def noisy(seed: int, n: int, memory: float, slope: float = -0.01) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kicks = torch.randn(n, generator=generator, dtype=torch.float64)
    x = [float(kicks[0]) / math.sqrt(1 - memory**2)]
    for kick in kicks[1:].tolist():
        x.append(memory * x[-1] + kick)
    return (slope * torch.arange(n, dtype=torch.float64) + 0.1 * torch.tensor(x, dtype=torch.float64)).exp()


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_the_interval_covers_the_rate(memory: float) -> None:
    """In 150 draws with and without memory. A binomial of 95 % is below 130 once in 10^4 draws."""
    inside, narrow = 0, 0
    losses = torch.linspace(2, 1, 200, dtype=torch.float64)
    for seed in range(150):
        g = noisy(seed, 200, memory)
        found = convergence(losses, g, learning_rate=0.1, last=1.0)
        low, high = found.rate.interval()
        inside += bool(low <= math.exp(-0.01) <= high)
        t = torch.arange(200, dtype=torch.float64) - 99.5
        y = g.log() - g.log().mean()
        s = float((t @ y) / t.square().sum())
        error = float(((y - s * t).square().sum() / 198 / t.square().sum()).sqrt())
        narrow += abs(s + 0.01) <= 1.97 * error
    assert inside >= 130
    if memory:
        assert narrow < 110  # errors of independent points are too small, so that the test can tell


def test_a_rate_that_changes_has_a_wide_interval() -> None:
    course = run(torch.tensor([0.01, 0.4], dtype=torch.float64), 60, lr=1.0)
    found = convergence(course["losses"], course["gradients"], learning_rate=1.0, last=1.0, spectrum=[0.01, 0.4])
    low, high = found.rate.interval()
    assert high - low > 0.01
    late = convergence(course["losses"], course["gradients"], learning_rate=1.0, last=0.3, spectrum=[0.01, 0.4])
    assert late.rate.stderr < found.rate.stderr
    assert late.agrees is True


def test_on_a_model() -> None:
    """Full-batch gradient descent on a small network, with small steps: gᵀHg/‖g‖² by a product beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))
    problem = cl.Problem(model, (x, y), cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    losses, gradients, truth = [], [], []
    for _ in range(30):
        g = problem.gradient()
        losses.append(problem.loss())
        gradients.append(g)
        truth.append(float(g @ (H @ g) / (g @ g)))
        with torch.no_grad():
            at = nn.utils.parameters_to_vector(model.parameters()) - 1e-3 * g
            nn.utils.vector_to_parameters(at, model.parameters())
    found = convergence(losses, gradients, learning_rate=1e-3)
    torch.testing.assert_close(found.curvature, torch.tensor(truth[:-1], dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(found.secant, torch.tensor(truth[:-1], dtype=torch.float64), rtol=1e-2, atol=0)
    assert not torch.allclose(found.curvature, found.secant, rtol=1e-6)  # the third derivative tells them apart


GOOD = [1.0 / (t + 1) for t in range(40)]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"losses": [1.0, math.nan, 2.0]}, "NaN or infinite, the first at step 1"),
    "short": ({"losses": [1.0]}, "expected two numbers or more"),
    "no numbers": ({"losses": "loss"}, "expected numbers"),
    "lengths": ({"gradients": GOOD[:-1]}, "gradients has 39 entries and losses 40"),
    "gradient": ({"gradients": [*GOOD[:-1], math.inf]}, "gradients are NaN or infinite, the first at step 39"),
    "norm": ({"gradients": [*GOOD[:-1], -1.0]}, "a norm has none"),
    "shape": ({"gradients": torch.zeros(40, 2, 2)}, r"expected \(steps \+ 1, numbers\)"),
    "ragged": ({"gradients": [torch.zeros(2), *[torch.zeros(3)] * 39]}, "flat vectors of one length"),
    "rate": ({"learning_rate": -0.1}, "learning_rate=-0.1, expected a number above 0"),
    "zero rate": ({"learning_rate": 0}, "learning_rate=0"),
    "momentum": ({"momentum": 1.0}, "momentum=1.0"),
    "nesterov": ({"nesterov": True}, "without momentum"),
    "last": ({"last": 0.0}, "last=0.0"),
    "spectrum": ({"spectrum": "wide"}, "expected eigenvalues"),
    "empty": ({"spectrum": []}, "one eigenvalue or more"),
    "nan": ({"spectrum": [1.0, math.nan]}, "NaN or infinite"),
    "zeros": ({"spectrum": [0.0, 0.0]}, "All eigenvalues are 0"),
    "no steps": ({"spectrum": {}}, "empty dict"),
    "step": ({"spectrum": {40: [1.0]}}, "the trajectory has the steps 0 to 39"),
    "parameters": (
        {"gradients": torch.zeros(40, 2), "parameters": torch.zeros(40, 3)},
        "give both of the same parameters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    given, message = BAD[name]
    with pytest.raises(cl.CurvlensError, match=message):
        convergence(**{"losses": GOOD, "learning_rate": 0.1, **given})


def test_too_few_steps_for_a_rate() -> None:
    found = convergence(GOOD[:6], GOOD[:6], learning_rate=0.1, spectrum=[1.0])
    assert math.isnan(float(found.rate))
    assert found.agrees is None
    assert "no rate: it needs 15 steps, and there are 6" in found.note
    assert len(found.curvature) == 5
    zero = convergence([*GOOD[:20], 0.0], [*GOOD[:20], 0.0], learning_rate=0.1)
    assert "from step 20 on ‖g‖ is 0 up to rounding" in zero.note
    assert math.isfinite(float(zero.rate))


def test_numpy_and_pictures(tmp_path: Any) -> None:
    course = run(EIGENVALUES, 40, lr=0.15)
    arrays: dict[str, Any] = {name: course[name].numpy() for name in ("losses", "gradients", "parameters")}
    found = convergence(**arrays, learning_rate=0.15, spectrum={0: [0.1, 5.0], 40: [0.1, 5.0]})
    assert isinstance(found, Convergence)
    for what in ("rate", "curvature", "condition"):
        found.plot(tmp_path / f"{what}.svg", what=what)
    with pytest.raises(cl.CurvlensError, match="what='loss'"):
        found.plot(what="loss")
    with pytest.raises(cl.CurvlensError, match="nothing to draw for what='curvature'"):
        convergence(GOOD, learning_rate=0.1).plot(what="curvature")
    text = repr(found)
    assert "gradient descent, η = 0.15" in text
    assert "2/η = 13.33" in text
    assert cl.load(found.save(tmp_path / "x")).window == found.window
