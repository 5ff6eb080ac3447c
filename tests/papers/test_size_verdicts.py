"""The experiments on the sizes of models and data: points against dense truths, and every verdict from planted laws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from curvlens.dynamics import learner, size_up
from curvlens.papers import Effort, Finding, named
from curvlens.papers.headlines import headline
from curvlens.papers.motion import scaling_laws, size_sweep
from curvlens.papers.motion.conditioning import BETTER
from curvlens.papers.motion.spectrum_size import _with_widths
from curvlens.report.drawing import draw
from curvlens.study import Record
from spectral_truth import agree, dense, expected
from test_verdicts import Make, found, jitter, made, verdict

SIZES = {2: 100, 4: 300, 6: 560, 8: 870, 12: 1700}
LAW = (0.3, 40.0, 0.6, 6.0, 0.5)


def point(
    norm: float = 0.5,
    condition: float = 0.0,
    width: float = 0.0,
    *,
    hidden: float = 0.0,
    through: float = 0.0,
    noise: float = 0.02,
) -> Make:
    """Norms go as D^norm N^width, the condition number as D^condition; ``hidden`` couples the loss to a norm that has
    its own scatter, ``through`` the training loss to that scatter."""
    E, A, alpha, B, beta = LAW

    def make(c: Mapping[str, Any]) -> Mapping[str, Any]:
        N, D = SIZES[c["width"]], c["samples"]
        own = {name: math.log(jitter({**c, "name": name}, 1.0)) for name in ("norm", "condition", "loss", "train")}
        scatter = 0.3 * own["norm"]
        loss = (E + A / N**alpha + B / D**beta) * math.exp(hidden * scatter + noise * own["loss"])
        size = 50 * D**norm * N**width
        values = {
            "parameters": N,
            "test_loss": loss,
            "train_loss": loss * math.exp(through * scatter + noise * own["train"]),
            "lambda_max": size * math.exp(scatter if hidden else noise * own["norm"]),
            "lambda_min": -0.1 * size,
            "frobenius": 2 * size * math.sqrt(N) * math.exp(noise * own["norm"]),
            "trace": 0.0,
            "condition": 30 * D**condition * math.exp(noise * own["condition"]),
        }
        return {"values": values, "errors": {}}

    return make


def test_a_point_is_what_dense_matrices_say() -> None:
    config = next(c for c in size_sweep.points(Effort(quick=True)) if c["stage"] == "best")
    measured = size_sweep.measure({**config, "dense": 1000})
    setting = {"d_model": config["width"], "mlp_ratio": 2, "samples": config["samples"], "steps": config["steps"]}
    problem, test = learner.learn(learner.completed(setting | {"check": size_sweep.CHECK}) | {"seed": config["seed"]})
    agree(measured, expected(problem, 10), 1e-7)
    assert measured["values"]["test_loss"] == pytest.approx(test.loss(), rel=1e-12)
    assert set(measured["values"]) == {*size_up.COUNTS, *size_up.MEASURED}


def test_three_experiments_share_their_points() -> None:
    for effort in (Effort(), Effort(quick=True)):
        units = [
            [unit.key for unit in named(name).units(effort)] for name in ("scaling", "conditioning", "spectrum-size")
        ]
        assert units[0] == units[1] == units[2]
        assert len(set(units[0])) == len(units[0])


@pytest.mark.parametrize(("power", "said"), [(-0.2, "holds"), (0.2, "does not hold"), (0.0, "does not hold")])
def test_conditioning(power: float, said: str) -> None:
    assert verdict("conditioning", "conditioning-data", point(condition=power)) == said


def test_conditioning_that_differs_between_seeds() -> None:
    def make(c: Mapping[str, Any]) -> Mapping[str, Any]:
        return point(condition=BETTER + 0.3 * (-1) ** c["seed"])(c)

    assert verdict("conditioning", "conditioning-data", make) == "undecided"


def test_conditioning_at_one_stage() -> None:
    def make(c: Mapping[str, Any]) -> Mapping[str, Any]:
        return point(condition=-0.3 if c["stage"] == "end" else 0.3)(c)

    some = found("conditioning", "conditioning-data", make)
    assert (some.verdict, some.regime) == ("holds when", "after the last step")


@pytest.mark.parametrize(("power", "said"), [(0.4, "holds"), (-0.8, "does not hold")])
def test_widths(power: float, said: str) -> None:
    assert verdict("spectrum-size", "spectrum-size", point(width=power)) == said


def test_the_range_and_not_the_deviation() -> None:
    def make(c: Mapping[str, Any]) -> Mapping[str, Any]:
        made: Any = point(width=0.4)(c)
        made["values"]["frobenius"] /= made["values"]["parameters"] ** 1.0
        return {**made}

    some = found("spectrum-size", "spectrum-size", make)
    assert some.verdict == "holds when"
    assert "λ_max − λ_min before training" in some.regime
    assert "standard deviation" not in some.regime


def test_the_standard_deviation_of_eigenvalues() -> None:
    """Against all eigenvalues of a small model."""
    setting = learner.completed({"d_model": 2, "mlp_ratio": 1, "digits": 1, "samples": 8, "steps": 5})
    problem, _ = learner.learn(setting | {"seed": 0})
    measured = size_up.measure(problem, None, size_up.Settings(4, 1e-6, 4, 2, 10, 1000), 0)
    values = torch.linalg.eigvalsh(dense(problem).hessian)
    record = _with_widths(Record("scaling", 1, {"seed": 0}, {"values": measured["values"], "errors": {}}))
    assert record.result["values"]["deviation"] == pytest.approx(float(values.std(correction=0)), rel=1e-8)
    assert record.result["values"]["range"] == pytest.approx(float(values[-1] - values[0]), rel=1e-8)


def records(make: Make, seeds: int) -> list[Record]:
    made_up = made(named("scaling"), make, Effort(seeds=seeds))
    return [scaling_laws._with_norm(record) for record in made_up]


@pytest.mark.parametrize(
    ("norm", "condition", "said"),
    [(-0.5, -0.5, "holds"), (0.3, 0.0, "does not hold"), (-0.5, 0.0, "holds when"), (-0.25, -0.25, "does not hold")],
)
def test_exponents(norm: float, condition: float, said: str) -> None:
    assert scaling_laws._exponents(records(point(norm, condition), 3)).verdict == said


def test_exponents_that_scatter_are_undecided() -> None:
    assert scaling_laws._exponents(records(point(-0.5, -0.5, noise=2.0), 3)).verdict == "undecided"


def explained(make: Make) -> Finding:
    known = records(make, 3)
    return scaling_laws._explained(scaling_laws._gains(known), scaling_laws._gains(known, ["train_loss"]))


def test_curvature_that_explains_the_loss() -> None:
    """A norm that the loss depends on helps, also beside a training loss that does not depend on it."""
    assert "by the spectral norm beside the training loss" in explained(point(hidden=2.0, through=-2.0)).regime


@pytest.mark.full
def test_curvature_that_the_training_loss_has() -> None:
    assert explained(point(hidden=2.0)).regime == "a prediction by the spectral norm"


@pytest.mark.full
def test_curvature_that_explains_nothing() -> None:
    assert explained(point(noise=0.05)).verdict in ("does not hold", "undecided")


@pytest.mark.parametrize("name", ["scaling", "conditioning", "spectrum-size"])
def test_reports_of_quick_points(name: str) -> None:
    report = named(name).report(made(named(name), point(), Effort(quick=True)))
    assert report.charts
    assert all(headline(finding)[0] for finding in report.findings)
    draw(report.charts[0])
