"""How the landscape settles as data grow: measured against brute force, and verdicts from made-up records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from curvlens.data import Addition
from curvlens.papers.headlines import headline
from curvlens.papers.learners import trained
from curvlens.papers.motion import data_convergence, second_order
from made_up import Result
from test_first_paper_verdicts import NO, UNDECIDED, WHEN, YES, judged


def test_increments_and_distances_by_hand() -> None:
    config = {"samples": 48, "few": 32, "orders": 20, "steps": 3, "seed": 4}
    found = data_convergence.measure(config)
    task = Addition(digits=2)
    model = trained(task, seed=4, steps=3)
    x, y = task.batch(48, seed=10**7 + 4)
    with torch.no_grad():
        rows = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    kept = (y >= 0).sum(1)
    assert int(kept.min()) == int(kept.max())
    loss = rows.sum(1) / kept
    generator = torch.Generator().manual_seed(4 + 1)
    increments, distances = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _ in range(20):
        order = torch.randperm(48, generator=generator)
        means = loss[order].cumsum(0) / torch.arange(1, 49)
        for i, k in enumerate((16, 32)):
            increments[i] += (means[k] - means[k - 1]) ** 2 / 20
            distances[i] += (means[k - 1] - means[-1]) ** 2 / (1 - k / 48) / 20
    assert found["k"]["increment"][:2] == [16, 32]
    assert found["rms"]["increment"][:2] == pytest.approx(increments.sqrt().tolist(), rel=1e-9)
    assert found["rms"]["distance"][:2] == pytest.approx(distances.sqrt().tolist(), rel=1e-9)


def test_the_reach_of_the_model() -> None:
    model = torch.ones(6, dtype=torch.float64)
    true = torch.tensor([1.0, 1.1, 1.2, 1.5, 1.0, 9.0], dtype=torch.float64)
    error = torch.full((6,), 0.01, dtype=torch.float64)
    assert second_order.reach(model, true, error) == 0.1
    assert second_order.reach(model, 2 * true, error) is None
    assert second_order.reach(model, true, 30 * error) is None  # too noisy to tell
    assert second_order.reach(model, true, 25 * error) == 1.0


def settling(increment: float, distance: float, gradient: float, hessian: float, noise: float = 0.01) -> Result:
    powers = dict(zip(data_convergence.NAMES, (increment, distance, gradient, hessian), strict=True))

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        off = noise * ((7 * config["seed"]) % 5 - 2)
        k = [4, 8, 16, 32]
        return {
            "k": dict.fromkeys(powers, k),
            "rms": {name: [n ** (power + off) for n in k] for name, power in powers.items()},
            "slopes": {name: power + off for name, power in powers.items()},
        }

    return result


def sized(quadratic: Mapping[int, float], *, holds: float | None = 0.3) -> Result:
    """Constant and linear terms of 1, and quadratic ones by stage."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        size = quadratic[config["steps"]] * (1 + 0.01 * config["seed"])
        rows = {"constant": 1.0, "linear": 1.0, "quadratic": size, "true": math.sqrt(2 + size**2)}
        return {name: [value] * 6 for name, value in rows.items()} | {"holds": holds, "gradient": 1.0}

    return result


CASES: list[tuple[str, str, Result, str]] = [
    ("data-convergence", "convergence", settling(-1, -0.5, -0.5, -0.5), WHEN),
    ("data-convergence", "convergence", settling(-1, -1, -1, -1), YES),
    ("data-convergence", "convergence", settling(-0.5, -0.5, -0.5, -0.5), NO),
    ("data-convergence", "convergence", settling(-1, -1, -1, -1, noise=0.4), UNDECIDED),
    ("second-order", "second-order", sized({0: 9.0, 400: 5.0}), YES),
    ("second-order", "second-order", sized({0: 0.2, 400: 5.0}), WHEN),
    ("second-order", "second-order", sized({0: 0.2, 400: 0.1}), NO),
    ("second-order", "second-order", sized({0: 9.0, 400: 5.0}, holds=None), UNDECIDED),
]


@pytest.mark.parametrize(("experiment", "claim", "result", "expected"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_verdicts_follow_the_data(experiment: str, claim: str, result: Result, expected: str) -> None:
    found = judged(experiment, result, seeds=5)
    assert {name: finding.verdict for name, finding in found.items()} == {claim: expected}
    assert headline(found[claim])[0] or expected == UNDECIDED


@pytest.mark.parametrize(("experiment", "claim", "result"), [CASES[1][:3], CASES[4][:3]])
def test_one_seed_confirms_nothing(experiment: str, claim: str, result: Result) -> None:
    assert judged(experiment, result, seeds=1)[claim].verdict == UNDECIDED
