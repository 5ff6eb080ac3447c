"""Steps, gaps, condition numbers, atoms and parts of the data against dense derivatives."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlens as cl
from curvlens.analysis import extremes
from curvlens.analysis.estimates import enclosed, estimate
from curvlens.analysis.instrument import Instrument
from curvlens.analysis.steps import edge, step
from curvlens.study import Record
from subjects import adder, batch, problem, rows
from truth import Truth

SEARCH = {"tol": 1e-4, "most": 200}


@cache
def truth() -> Truth:
    return Truth(adder(), [batch()], rows, square=False)


def spectrum(letter: str) -> Tensor:
    """All eigenvalues, the largest first."""
    values: Tensor = torch.linalg.eigvalsh(truth().hessian if letter == "H" else truth().ggn).flip(0)
    return values


def rises(direction: Tensor, low: float, high: float) -> bool:
    """Whether the loss is below its start at ``low`` times the step and not below it at ``high`` times the step."""
    asked = problem()
    losses = [asked.with_params(asked.theta - s * direction).loss() for s in (low, high)]
    return losses[0] < asked.loss() <= losses[1]


def test_gradient_descent() -> None:
    asked = problem()
    found = step(Instrument(asked).measure_descent({}))
    g, H = asked.gradient(), truth().hessian
    assert found["critical"] == pytest.approx(float(2 * (g @ g) / (g @ H @ g)), rel=1e-8)
    assert found["certain"]
    assert found["measured"]["high"] < 1.06 * found["measured"]["low"]
    assert rises(g, found["measured"]["low"], found["measured"]["high"])


def test_adam_at_this_point() -> None:
    asked = problem()
    found = edge(Instrument(asked).measure_adam({"lr": 1e-3, **SEARCH}))
    g, H = asked.gradient(), truth().hessian
    scale = (g.abs() + 1e-8).rsqrt()
    sharpness = float(torch.linalg.eigvalsh(scale[:, None] * H * scale)[-1])
    cell = found["preconditioned"]
    assert cell["low"] <= sharpness * (1 + 1e-9) <= cell["high"] * (1 + 2e-9)
    assert cell["value"] == pytest.approx(sharpness, rel=1e-5)
    d = 1e-3 * g / (g.abs() + 1e-8)
    assert found["step"]["critical"] == pytest.approx(float(2 * (g @ d) / (d @ H @ d)), rel=1e-6)
    assert rises(d, found["step"]["measured"]["low"], found["step"]["measured"]["high"])
    assert sum(found["mass"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimiser_with_and_without_a_state(steps: int) -> None:
    """The step that is searched along is the one that torch takes next."""
    model = copy.deepcopy(adder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    asked = cl.Problem(model, batch(), cl.losses.CausalLM(shift=False))

    def move() -> None:
        for name, part in asked.layout.unflatten(asked.gradient()).items():
            model.get_parameter(name).grad = part.clone()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        move()
        asked = cl.Problem(model, batch(), cl.losses.CausalLM(shift=False))
    found = edge(Instrument(asked, optimizer=optimizer).measure_stability({"tol": 5e-2, "most": 24}))
    assert found["note"].startswith("second moments taken as g²") == (steps == 0)
    before, g = asked.theta, asked.gradient()
    place = asked.with_params(before)
    low, high = found["step"]["measured"]["low"], found["step"]["measured"]["high"]
    start = place.loss()
    move()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    d = before - after
    assert found["step"]["slope"] == pytest.approx(float(g @ d), rel=1e-9)
    fixed = cl.Problem(copy.deepcopy(model), batch(), cl.losses.CausalLM(shift=False))
    assert fixed.with_params(before - low * d).loss() < start <= fixed.with_params(before - high * d).loss()


def test_a_stationary_point_has_an_edge_and_no_step() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    data = (torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    asked = cl.Problem(model, data, cl.losses.MSE())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    found = edge(Instrument(asked, optimizer=optimizer).measure_stability({"tol": 1e-8, "most": 24}))
    assert found["ratio"] == pytest.approx(0.75)
    assert "step" not in found
    assert "no step: The step of the optimiser is 0" in found["note"]


def eigs_record(k: int) -> Record:
    config = {"operator": "H", "k": k, "tol": 1e-6, "most": 300, "seed": 0}
    return Record("eigs", 1, config, Instrument(problem()).measure_eigs(config).result, 0.0, {})


def test_the_gap() -> None:
    values = spectrum("H")
    found = extremes.gap(eigs_record(2))
    assert found is not None
    assert found["value"] == pytest.approx(float(values[0] - values[1]), rel=1e-6)
    assert found["low"] <= float(values[0] - values[1]) * (1 + 1e-9)
    assert extremes.gap(eigs_record(1)) is None  # the second of one at each end is the smallest
    open_end = eigs_record(2)
    open_end.result["converged"][-2] = False
    assert extremes.gap(open_end) is None


@pytest.mark.parametrize("letter", ["H", "G"])
def test_condition_numbers_and_atoms(letter: str) -> None:
    asked = problem()
    operator = cl.hessian(asked) if letter == "H" else cl.ggn(asked)
    values, found = spectrum(letter), []
    for seed in range(4):
        density = cl.density(operator, probes=2, steps=40, seed=seed)
        condition = extremes.condition(density, enclosed(float(values[0]), 1e-9))
        if condition is not None:
            true = float(values[0] / values[condition["directions"] - 1])
            found.append(condition["low"] <= true <= condition["high"])
            assert condition["high"] < 6.1 * condition["low"]
        near = int((values.abs() <= extremes.WIDTH * values[0]).sum()) / density.n
        atoms = extremes.atoms(density)
        assert [atom["at"] for atom in atoms] == ([0.0] if letter == "G" else [])
        assert all(0.9 * near < atom["value"] < near + 3 * atom["stderr"] for atom in atoms)
    assert all(found)
    assert found or letter == "G"


def test_an_exact_spectrum() -> None:
    values = torch.cat([torch.zeros(6), torch.ones(3), torch.tensor([4.0])]).double()
    density = cl.density(torch.diag(values))
    assert density.exact
    atoms = extremes.atoms(density)
    assert [(atom["at"], round(atom["value"], 9), atom["exact"]) for atom in atoms] == [
        (0.0, 0.6, True),
        (1.0, 0.3, True),
    ]
    condition = extremes.condition(density, None)
    assert condition is not None
    assert (condition["directions"], condition["low"], condition["high"]) == (2, 4.0, pytest.approx(4.0))


def test_parts_of_the_data() -> None:
    instrument = Instrument(problem())
    config: dict[str, Any] = {"of": 4, "samples": 8, "seed": 0}
    tokens, labels = batch()
    for part in range(4):
        found = instrument.measure_sharp_part({**config, "part": part, "tol": 2e-2, "most": 14})
        own = slice(3 * part, 3 * part + 3)
        H = Truth(adder(), [(tokens[own], labels[own])], rows, square=False).hessian
        top = float(torch.linalg.eigvalsh(H)[-1])
        assert found["top"] - found["residual"] <= top
        assert found["top"] == pytest.approx(top, rel=1e-2)
        trace = estimate(found["trace"])
        assert abs(float(trace.value) - float(H.trace())) < 5 * float(trace.stderr)


def test_an_optimiser_that_is_not_known_is_refused_at_once(tmp_path: Path) -> None:
    asked = problem()
    optimizer = torch.optim.NAdam(asked.model.parameters())
    with pytest.raises(cl.CurvlensError, match="NAdam, whose rule is not known here"):
        cl.analyze(asked, tmp_path / "run", "400 gradients", optimizer=optimizer)
