"""Sweeps over settings: the numbers against dense truths, killed and resumed, larger grids, and users' own models."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvlens as cl
import interrupts
from curvlens import CurvlensError
from curvlens.dynamics import learner, scaling, size_up
from curvlens.results import Status
from curvlens.study import Study, Unit
from killing import ONE_THREAD, killed_when
from small import gpt
from spectral_truth import agree, expected

TINY: dict[str, Any] = {"d_model": 2, "mlp_ratio": 1, "digits": 1}
"""106 parameters, and 100 pairs of numbers."""


@pytest.fixture(scope="module")
def learned() -> tuple[cl.Problem, cl.Problem]:
    return learner.learn(learner.completed(TINY | {"samples": 20, "steps": 30}) | {"seed": 1})


def test_all_numbers_of_a_model(learned: tuple[cl.Problem, cl.Problem]) -> None:
    problem, test = learned
    found = size_up.measure(problem, test, size_up.Settings(5, 1e-6, 8, 2, 12, 400), 0)
    agree(found, expected(problem, 5), 1e-7)
    assert all(found["errors"][name] == 0 for name in ("trace", "frobenius", "lambda_max", "negative_mass"))
    assert found["values"]["test_loss"] == pytest.approx(test.loss(), rel=1e-12)


def test_sampled_numbers_are_within_their_errors(learned: tuple[cl.Problem, cl.Problem]) -> None:
    problem, _ = learned
    known = expected(problem, 5)
    for seed in range(2):
        found = size_up.measure(problem, None, size_up.Settings(5, 1e-6, 12, 2, 12, 0), seed)
        assert found["errors"]["trace"] > 0
        agree(found, known, 1e-7)
        assert math.isnan(found["values"]["test_loss"])


def test_a_wrong_factor_would_be_seen(learned: tuple[cl.Problem, cl.Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hessian with a factor, and in place of G."""
    monkeypatch.setattr(size_up, "hessian", lambda problem: 1.01 * cl.hessian(problem))
    monkeypatch.setattr(size_up, "ggn", cl.hessian)
    problem, _ = learned
    found = size_up.measure(problem, None, size_up.Settings(5, 1e-6, 8, 2, 12, 400), 0)
    known = expected(problem, 5)
    for name in ("lambda_max", "lambda_min", "trace", "frobenius", "condition"):
        assert abs(found["values"][name] / known[name] - 1) > 1e-3, name


def test_the_error_of_a_test_loss() -> None:
    """Over fresh tests, the loss of the same model scatters as its error says."""
    config = learner.completed({"d_model": 2, "mlp_ratio": 1, "samples": 50, "steps": 30}) | {"seed": 0}
    problem, _ = learner.learn(config)
    losses, errors = [], []
    for seed in range(20):
        batch = cl.data.Addition(digits=2).batch(50, seed=seed)
        test = cl.Problem(problem.model, batch, cl.losses.CrossEntropy())
        losses.append(test.loss())
        errors.append(size_up._error_of_loss(test))
    spread = float(torch.tensor(losses).std())
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.35)


# What is trained


def test_data_of_the_learner() -> None:
    """Training, check and test share no pair; fewer samples are part of more; seeds differ."""
    few, more = (learner.data(learner.completed(TINY | {"samples": n}) | {"seed": 3}) for n in (10, 50))
    other = learner.data(learner.completed(TINY | {"samples": 50}) | {"seed": 4})
    assert torch.equal(few[0][0], more[0][0][:10])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(few[1:], more[1:], strict=True))
    assert not torch.equal(more[2][0], other[2][0])
    everything = torch.cat([tokens for tokens, _ in more])
    assert len({tuple(row) for row in everything.tolist()}) == len(everything) == 50 + 25 + 25


def test_the_learner_is_adam_as_torch_has_it() -> None:
    config = learner.completed(TINY | {"samples": 10, "steps": 3, "batch": 4}) | {"seed": 5}
    before = torch.get_rng_state()
    problem, _ = learner.learn(config)
    assert torch.equal(torch.get_rng_state(), before)
    model = learner.learn(config | {"steps": 0})[0].model
    (x, y), *_ = learner.data(config)
    adam, draws = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1_000_005)
    for _ in range(3):
        rows = torch.randperm(10, generator=draws)[:4]
        adam.zero_grad()
        F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, dict(problem.model.named_parameters())[name])


def test_check_keeps_the_lowest() -> None:
    """On few samples the loss on others rises again; the weights are those of the lowest checked loss."""
    config = learner.completed({"d_model": 4, "samples": 8, "check": 10}) | {"seed": 0}
    check = learner.data(config)[1]
    losses = []
    for steps in range(0, 70, 10):
        last = learner.learn(config | {"steps": steps, "check": 0})[0]
        losses.append(cl.Problem(last.model, check, cl.losses.CrossEntropy()).loss())
    kept = learner.learn(config | {"steps": 60})[0]
    found = cl.Problem(kept.model, check, cl.losses.CrossEntropy()).loss()
    assert losses[-1] > min(losses) + 0.05
    assert found == pytest.approx(min(losses), rel=1e-12)


# Sweeps


CALLS: list[dict[str, Any]] = []


def tiny(config: Mapping[str, Any]) -> cl.Problem:
    """Of a user: least squares; ``diverges`` ends in NaN."""
    CALLS.append(dict(config))
    torch.manual_seed(config["seed"])
    model = nn.Linear(3, config.get("outputs", 1)).double()
    x = torch.randn(config["samples"], 3, dtype=torch.float64)
    if config.get("diverges"):
        with torch.no_grad():
            model.weight.fill_(math.nan)
    return cl.Problem(model, (x, x[:, :1].expand(-1, config.get("outputs", 1))), cl.losses.MSE())


def pair(config: Mapping[str, Any]) -> tuple[cl.Problem, cl.Problem]:
    return tiny(config), tiny({**config, "samples": 100})


def strange(config: Mapping[str, Any]) -> Any:
    return [tiny(config)]


def hasty(config: Mapping[str, Any]) -> Any:
    if config["samples"] == 7:
        raise KeyboardInterrupt
    return tiny(config)


def test_a_larger_grid_adds_what_is_missing(tmp_path: Path) -> None:
    CALLS.clear()
    small = scaling({"samples": [5, 10]}, tmp_path, train=tiny, seeds=2)
    assert [(c["samples"], c["seed"]) for c in CALLS] == [(5, 0), (10, 0), (5, 1), (10, 1)]
    seen: list[tuple[int, int | None]] = []
    large = scaling(
        {"samples": [5, 10, 20]}, tmp_path, train=tiny, seeds=[1, 0, 7], progress=lambda *now: seen.append(now)
    )
    assert [(c["samples"], c["seed"]) for c in CALLS[4:]] == [(20, 1), (20, 0), (5, 7), (10, 7), (20, 7)]
    assert seen == [(i, 5) for i in range(1, 6)]
    assert scaling({"samples": [10, 5]}, tmp_path, train=tiny, seeds=2).values.keys() == small.values.keys()
    assert len(CALLS) == 9
    assert large.settings == {"samples": [5, 10, 20] * 3, "seed": [1, 1, 1, 0, 0, 0, 7, 7, 7]}
    row = {(s, d): i for i, (s, d) in enumerate(zip(large.settings["seed"], large.settings["samples"], strict=True))}
    for i, place in enumerate([(0, 5), (0, 10), (1, 5), (1, 10)]):
        assert float(large.values["trace"][row[place]]) == float(small.values["trace"][i])
    scaling({"samples": [5]}, tmp_path, train=tiny, seeds=1, revision=2)
    scaling({"samples": [5]}, tmp_path, train=tiny, seeds=1, top=3)
    assert len(CALLS) == 11


def test_the_table(tmp_path: Path) -> None:
    found = scaling([{"samples": 5}, {"samples": 10, "outputs": 2}], tmp_path, train=pair, seeds=1)
    first, second = found.table()
    assert (first["samples"], first["outputs"], second["outputs"]) == (5, None, 2)
    assert first["parameters"] == 4
    assert second["parameters"] == 8
    assert first["test_loss_error"] > 0
    again = cl.load(found.save(tmp_path / "saved"))
    assert again.table() == found.table()
    assert found.column("samples") == [5, 10]
    assert len(found) == 2
    assert found.varying() == ["samples", "outputs"]
    with pytest.raises(CurvlensError, match=r"no column 'trce'. Did you mean 'trace'"):
        found.column("trce")
    law = cl.dynamics.power_law(scaling({"samples": [5, 10, 20]}, tmp_path, train=pair), "trace", "samples")
    assert len(law.exponents) == 3


def test_a_training_that_diverges_has_no_numbers(tmp_path: Path) -> None:
    found = scaling({"samples": [5], "diverges": [False, True]}, tmp_path, train=tiny, seeds=1)
    good, bad = found.table()
    assert good["trace"] is not None
    assert bad["trace"] is None


def test_an_interrupt_leaves_what_is_done(tmp_path: Path) -> None:
    before = interrupts.surroundings()
    found = scaling({"samples": [5, 7, 9]}, tmp_path, train=hasty, seeds=1)
    assert interrupts.surroundings().keys() == before.keys()
    assert found.status is Status.INTERRUPTED
    assert found.left == 2
    assert found.note == "interrupted, 2 of 3 models are left: the same call continues"
    with pytest.raises(KeyboardInterrupt):
        scaling({"samples": [7]}, tmp_path, train=hasty, seeds=1)


def test_a_budget_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid: dict[str, Any] = {"samples": [5, 6, 8, 9]}
    with pytest.raises(CurvlensError, match=r"ended before the first of 4 models. Give more time"):
        scaling(grid, tmp_path, train=tiny, seeds=1, budget=1e-9)
    running = sys.modules["curvlens.study.run"]

    def late(_: Any, unit: Unit) -> float:
        return 1e9 if unit.config["setting"]["samples"] > 6 else 0.0

    monkeypatch.setattr(running, "Pace", type("Pace", (running.Pace,), {"expected": late}))
    found = scaling(grid, tmp_path, train=tiny, seeds=1, budget="1h")
    assert (found.status, found.left, len(found)) == (Status.STOPPED_AT_BUDGET, 2, 2)
    monkeypatch.undo()
    whole = scaling(grid, tmp_path, train=tiny, seeds=1, budget="1h")
    assert (whole.status, whole.left, len(whole)) == (Status.COMPLETE, 0, 4)


def slow(config: Mapping[str, Any]) -> cl.Problem:
    time.sleep(0.05)
    return tiny(config)


GRID: dict[str, Any] = {"samples": [5, 10, 20], "outputs": [1, 2]}


def child(folder: str) -> None:
    scaling(GRID, folder, seeds=3, train=slow)


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The same table, bit by bit, as of a sweep that was left alone."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", f"from tests.dynamics.test_scaling import child; child({str(killed)!r})"]
    killed_when(command, killed / "scaling.jsonl", 4)
    done = len(Study(killed).records("scaling"))
    assert 3 <= done < 18
    one, other = (scaling(GRID, folder, seeds=3, train=slow).table() for folder in (killed, whole))
    assert one == other


@pytest.mark.full
def test_processes_do_not_matter(tmp_path: Path) -> None:
    grid = TINY | {"samples": [5, 10], "steps": [0, 10]}
    one, two = (scaling(grid, tmp_path / str(jobs), seeds=2, jobs=jobs) for jobs in (1, 2))
    assert one.table() == two.table()


@pytest.mark.full
def test_a_script_with_its_own_model(tmp_path: Path) -> None:
    """A function of __main__ in two processes."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, torch, curvlens as cl\n"
        "def train(config):\n"
        "    torch.manual_seed(config['seed'])\n"
        "    x = torch.randn(config['samples'], 3, dtype=torch.float64)\n"
        "    return cl.Problem(torch.nn.Linear(3, 1).double(), (x, x[:, :1]), cl.losses.MSE())\n"
        "if __name__ == '__main__':\n"
        "    print(cl.dynamics.scaling({'samples': [5, 10]}, sys.argv[1], train=train, jobs=2))\n"
    )
    run = [sys.executable, str(script), str(tmp_path / "out")]
    said = subprocess.run(run, check=True, capture_output=True, text=True, env={**os.environ, **ONE_THREAD}).stdout
    assert said.startswith("Scaling(6 trained models, 3 seeds; samples 5 to 10")


def test_bad_grids(tmp_path: Path) -> None:
    for given, message in (
        ({}, "The grid is empty"),
        ([], "The grid is empty"),
        ({"samples": []}, r"samples=\[\] has no values"),
        ({"sample": [5]}, r"'sample' is no setting of the GPT that adds. Did you mean 'samples'"),
        ({"samples": [0]}, "samples=0, expected a whole number, 1 or more"),
        (
            {"samples": [20000]},
            "10000 pairs, of which 1024 are held out. Give at most samples=8976",
        ),
        ({"d_model": [7]}, "d_model=7 is not divisible by n_head=2"),
        ({"d_model": ["8"]}, "d_model='8', expected a whole number"),
        ({"digits": [5]}, "digits=5, expected 1 to 3"),
        ({"lr": [-1.0]}, "lr=-1.0, expected a learning rate"),
        ({"seed": [1]}, "Seeds are given by seeds="),
        ({"steps": {"a": 1}}, "expected a list of values"),
        ([3], "A setting is an int, expected a mapping"),
        ("samples", "settings is a str, expected a grid"),
        (5, "settings is an int, expected a grid"),
        ({"samples": [[5]]}, r"samples=\[5\], expected a number, a text"),
    ):
        with pytest.raises(CurvlensError, match=message):
            scaling(given, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_bad_options(tmp_path: Path) -> None:
    grid = {"samples": [5]}
    for options, message in (
        ({"seeds": 0}, "seeds=0, expected how many"),
        ({"seeds": [0.5]}, "expected how many"),
        ({"top": 1}, "top=1, expected a whole number, 2 or more"),
        ({"floor": 2}, "floor=2, expected a share"),
        ({"products": True}, "products=True, expected a whole number"),
        ({"budget": "20 gradients"}, "expected a time"),
        ({"train": lambda config: None}, "expected a function at the top of a module"),
        ({"train": 3}, "expected a function at the top of a module"),
        ({"train": strange}, "train returned a list, expected a Problem, or two"),
    ):
        with pytest.raises(CurvlensError, match=message):
            scaling(grid, tmp_path / message[:5].strip("="), **({"train": tiny} | options))


def test_a_folder_belongs_to_one_function(tmp_path: Path) -> None:
    scaling({"samples": [5]}, tmp_path, train=tiny, seeds=1)
    with pytest.raises(CurvlensError, match="train"):
        scaling({"samples": [5]}, tmp_path, train=pair, seeds=1)


def test_a_gpt_of_ones_own(tmp_path: Path) -> None:
    """A model without test data, with another loss function."""
    found = scaling({"samples": [4]}, tmp_path, train=own, seeds=1)
    (row,) = found.table()
    assert row["test_loss"] is None
    assert row["parameters"] == sum(p.numel() for p in gpt().parameters())


def own(config: Mapping[str, Any]) -> cl.Problem:
    tokens = torch.randint(7, (config["samples"], 6), generator=torch.Generator().manual_seed(config["seed"]))
    return cl.Problem(gpt(config["seed"]), tokens, cl.losses.CausalLM())
