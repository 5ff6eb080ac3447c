"""The critical batch size: branches on a quadratic, where it is known, and every outcome from made-up data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers import Effort, named
from curvlens.papers.draws import stream
from curvlens.papers.learners import trained
from curvlens.papers.motion import critical_batch
from curvlens.papers.motion.critical_batch import Branches, best, fitted, gains
from curvlens.report.drawing import draw
from test_verdicts import found, made


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def regression() -> tuple[nn.Module, tuple[Tensor, Tensor], float, float]:
    """A linear regression, tr(HΣ)/gᵀHg of its samples and the most that a step of gradient descent gains."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 1.0, 1.0, 0.5, 0.3])
    y = x @ torch.ones(5, 1, dtype=torch.float64) + torch.randn(300, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    rows = -2 * y * x
    g, H = rows.mean(0), 2 * x.T @ x / 300
    e = rows - g
    bent = float(g @ H @ g)
    return model, (x, y), float(((e @ H) * e).sum() / 300) / bent, 0.5 * float(g @ g) ** 2 / bent


def test_branches_on_a_quadratic() -> None:
    """One step there has the critical size tr(HΣ)/gᵀHg, and gains ½ ‖g‖⁴/gᵀHg from all the data."""
    model, data, scale, most = regression()
    branches = Branches(model, data, square, seed=1)
    result = gains(branches, 1, [2.0**k for k in range(8)], 200)
    assert result["critical"] == pytest.approx(scale, rel=0.1)
    assert result["most"] == pytest.approx(most, rel=0.03)
    for size, gain, error in zip(result["sizes"], result["gain"], result["error"], strict=True):
        assert abs(gain - most / (1 + scale / size)) < 4 * error + 0.02 * gain


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of twice the size that they are said to have halve the critical size."""
    model, data, scale, _ = regression()
    true = Branches.batches
    monkeypatch.setattr(Branches, "batches", lambda self, size, *rest: true(self, 2 * size, *rest))
    result = gains(Branches(model, data, square, seed=1), 1, [2.0**k for k in range(8)], 200)
    assert result["critical"] == pytest.approx(scale / 2, rel=0.15)


def test_long_branches_are_steps_of_sgd() -> None:
    """Against torch's own optimiser on the same batches."""
    model, (x, y), _, _ = regression()
    branches = Branches(model, (x, y), square, seed=2)
    batches = branches.batches(4, 3, 2)
    fallen = branches.many(batches, 0.03)
    for draw_, fall in enumerate(fallen.tolist()):
        copy = nn.Linear(5, 1, bias=False).double()
        copy.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.03)
        for chosen in batches[:, draw_]:
            optimizer.zero_grad()
            square(copy(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        lower = float((square(model(x), y) - square(copy(x), y)).detach())
        assert fall == pytest.approx(lower, rel=1e-12)
    once = branches.one(batches[:1])(0.03)
    torch.testing.assert_close(once, branches.many(batches[:1], 0.03), rtol=1e-12, atol=0)


def test_the_fit() -> None:
    sizes = [2.0**k for k in range(1, 10)]
    gain = [0.3 / (1 + 17 / size) for size in sizes]
    most, critical = fitted(sizes, gain, [0.01 * x for x in gain])
    assert most == pytest.approx(0.3, rel=1e-2)
    assert critical == pytest.approx(17, rel=1e-2)
    assert fitted(sizes, [-0.01, *gain[1:]], [0.1] + [0.003] * 8)[1] == pytest.approx(17, rel=0.1)  # one is all noise
    assert math.isnan(fitted(sizes, [-x for x in gain], gain)[1])
    assert math.isnan(fitted(sizes, [0.3] * 9, [0.01] * 9)[1])  # no critical size above 0


def test_the_best_rate_is_judged_on_other_draws() -> None:
    """Draws whose best rates differ: chosen on themselves they would gain more."""
    generator = torch.Generator().manual_seed(0)
    slopes = 1 + 3 * torch.randn(40, generator=generator, dtype=torch.float64)

    def fall(rate: float) -> Tensor:
        return slopes * rate - 0.5 * rate**2

    rate, fallen = best(fall, 1.0)
    assert rate == pytest.approx(float(slopes.mean()), rel=0.1)
    assert float(fallen.mean()) < float(fall(rate).mean())


def made_up(curved: float = 1.0, simple: float = 1.0, power: float = 0.5, many: float = 1.0) -> Any:
    """Critical sizes over both scales, and their power in the width of the spectrum."""

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        spectrum = 10.0 * (1 + c["steps"] / 50) * c["width"]
        critical = spectrum**power * math.exp(0.05 * math.sin(7 * c["seed"] + c["steps"]))
        sizes = [2.0**k for k in range(1, 9)]
        branch = {
            "sizes": sizes,
            "gain": [0.1 / (1 + critical / size) for size in sizes],
            "error": [0.001] * 8,
            "rates": [0.1] * 8,
            "most": 0.1,
        }
        return {
            "simple": critical / simple if simple else "nan",
            "curved": critical / curved if curved else "nan",
            "spectrum": spectrum,
            "loss": 1.0,
            "one": {**branch, "critical": critical},
            "many": {**branch, "critical": many * critical},
        }

    return make


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "holds"),
        ({"curved": 5.0, "power": -0.5}, "does not hold"),
        ({"curved": 0.2, "power": -0.5}, "does not hold"),
        ({"curved": 5.0}, "holds when"),
        ({"many": 5.0}, "holds when"),
        ({"curved": 0.0, "power": 0.0}, "undecided"),
    ],
)
def test_the_curvature_and_the_critical_batch(options: dict[str, float], said: str) -> None:
    finding = found("critical-batch", "critical-batch", made_up(**options), seeds=4, quick=False)
    assert finding.verdict == said
    if options == {"curved": 5.0}:
        assert finding.regime == "the wider the spectrum, the larger the critical batch"
    if options.get("curved") == 0.0:
        assert "no prediction" in finding.measured


@pytest.mark.parametrize(("simple", "said"), [(1.1, "holds"), (4.0, "does not hold"), (2.0, "undecided")])
def test_the_simple_scale(simple: float, said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        wide = 1.0 if said != "undecided" else 1.5 ** (-1) ** c["seed"]
        return dict(made_up(simple=simple * wide)(c))

    assert found("critical-batch", "critical-batch-simple", make, seeds=4).verdict == said


def test_one_seed_decides_nothing_and_draws() -> None:
    assert found("critical-batch", "critical-batch", made_up(), seeds=1).verdict == "undecided"
    experiment = named("critical-batch")
    for seeds in (1, 3):
        for chart in experiment.report(made(experiment, made_up(), Effort(quick=True, seeds=seeds))).charts:
            draw(chart)


@pytest.mark.full
def test_noise_scales_of_a_point() -> None:
    """Against gradients of single samples and the dense Hessian."""
    config = {"width": 8, "steps": 50, "samples": 40, "draws": 2, "seed": 1}
    result = critical_batch.measure(config)
    task = Addition(digits=2)
    model = trained(task, seed=1, steps=50, d_model=8, d_mlp=16)
    x, y = task.batch(40, seed=stream(1, "sequences"))
    rows = []
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(a[None])[0], b)
        rows.append(torch.cat([p.flatten() for p in torch.autograd.grad(loss, list(model.parameters()))]))
    G = torch.stack(rows)
    H = cl.hessian(cl.Problem(model, (x, y), cl.losses.CrossEntropy())).dense()
    g, e = G.mean(0), G - G.mean(0)
    assert result["simple"] == pytest.approx(float(e.square().sum() / len(e) / (g @ g)), rel=1e-9)
    assert result["curved"] == pytest.approx(float(((e @ H) * e).sum() / len(e) / (g @ H @ g)), rel=1e-8)
    values = torch.linalg.eigvalsh(H)
    assert result["spectrum"] == pytest.approx(float(values[-1] - values[0]), rel=1e-2)
