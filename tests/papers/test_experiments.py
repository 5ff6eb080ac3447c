"""The papers' experiments: what is measured against independent truths, and results that survive anything."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import curvlens as cl
from curvlens import CurvlensError
from curvlens.cli import app
from curvlens.data import Addition
from curvlens.papers import (
    CLAIMS,
    EXPERIMENTS,
    Effort,
    Experiment,
    named,
    setting,
)
from curvlens.papers.first_paper import deep_blocks, entries, growth, linear_networks
from curvlens.papers.reference import references
from curvlens.papers.sizes import UNDERFLOW, marked, named_marks, sized
from curvlens.papers.sweeps import Sweep, sweep
from curvlens.report.charts import Chart, Curve, Heat, Panel, Slope
from curvlens.report.drawing import draw
from curvlens.study import Record
from networks import gpt, set_weights

QUICK = Effort(quick=True)


@pytest.mark.parametrize(
    ("norm", "kind", "sigma"),
    [(norm, kind, 0.5) for norm in ("none", "pre") for kind in ("softmax", "linear")] + [("pre", "softmax", 1e-4)],
)
def test_the_block_of_the_papers_is_the_reference_gpt(norm: Any, kind: Any, sigma: float) -> None:
    """Every norm of every block and part, against the assembly of the whole network; also below √ε."""
    width, task = 4, Addition()
    H = setting.block_hessian(width, sigma=sigma, seed=3, norm=norm, kind=kind, sequences=3)
    model = gpt(width, 1, norm, kind)
    set_weights(model, setting.weights(width, sigma=sigma, seed=3, task=task))
    ids, labels = task.batch(3, seed=3)
    truth = cl.assembly.read(model).hessian(ids, labels=labels)
    name = {letter: f"h.0.attn.{letter.lower()}.weight" for letter in "QKVO"}
    for first in "QKVO":
        for second in "QKVO":
            key = (name[first], name[second])
            for part, form in (("outer", truth.ggn), ("functional", truth.functional), ("total", truth.total)):
                scale = 1e-13 * truth.total.norm((key[0], key[0]))
                assert H.norm((first, second), part) == pytest.approx(form.norm(key), rel=1e-10, abs=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_layer_of_a_deep_network_is_exact(layers: int) -> None:
    task = Addition()
    ids, labels = task.batch(3, seed=0)
    torch.manual_seed(layers)
    model = gpt(4, layers).initialise(embed_std=0.7)

    def weight(module: Any) -> torch.Tensor:
        found: torch.Tensor = module.weight.detach().T.clone()
        return found

    every: list[Any] = list(model.h)
    blocks = []
    for b in every:
        q, k, v, o = (weight(module) for module in (b.attn.q, b.attn.k, b.attn.v, b.attn.o))
        blocks.append(setting.Layer(q, k, v, o, weight(b.mlp.up), weight(b.mlp.down)))
    x = model.embed.weight.detach()[ids] + model.pos.weight.detach()
    found = deep_blocks.layer_norms(x, labels, blocks, weight(model.unembed))
    truth = cl.assembly.read(model).hessian(ids, labels=labels)
    for number in range(layers):
        for letter in "QKVO":
            name = f"h.{number}.attn.{letter.lower()}.weight"
            expected = [form.norm(name) for form in (truth.ggn, truth.functional, truth.total)]
            assert found[number][letter] == pytest.approx(expected, rel=1e-11, abs=1e-14)


def test_the_linear_cnn_is_differentiated_as_torch_does() -> None:
    config = {"network": "cnn", "residual": "constant", "sigma": 0.1, "seed": 1}
    found = linear_networks.measure(config)
    draws = torch.Generator().manual_seed(1)
    x = 0.1 * torch.randn(4, 9, 6, generator=draws, dtype=torch.float64)
    y = torch.randn(4, 9, 6, generator=draws, dtype=torch.float64)
    w = [0.2 * torch.randn(9, 9, 3, generator=draws, dtype=torch.float64) for _ in range(2)]

    def output(flat: torch.Tensor) -> torch.Tensor:
        a, b = flat.view(2, 9, 9, 3)
        return nn.functional.conv1d(nn.functional.conv1d(x, a, padding=1), b, padding=1).flatten()

    theta = torch.stack(w).flatten()
    H = torch.func.hessian(lambda flat: nn.functional.mse_loss(output(flat), y.flatten()))(theta)
    J = torch.func.jacrev(output)(theta)
    outer = 2 / y.numel() * J.T @ J
    assert found["outer"] == pytest.approx(float(outer.norm()), rel=1e-10)
    assert found["functional"] == pytest.approx(float((H - outer).norm()), rel=1e-9)


# Sweeps and marks


def test_what_float64_cannot_hold_is_marked_and_told() -> None:
    assert sized(1e-3) == 1e-3
    assert sized(0.0) == UNDERFLOW
    assert sized(1e-300) == UNDERFLOW
    assert sized(math.inf) == math.inf
    assert math.isinf(float(sized(math.nan)))
    records = [
        Record("e", 1, {"sigma": sigma, "seed": seed}, named_marks({"norm": value}))
        for seed in (0, 1)
        for sigma, value in ((0.1, UNDERFLOW), (1.0, 2.0), (10.0, 2e3), (100.0, 2e6), (1000.0, math.inf))
    ]
    line = sweep(records, "sigma", "norm")
    assert line.law().slope == pytest.approx(3)
    assert line.finite().x == (1.0, 10.0, 100.0)
    notes = marked(records)
    assert any("too small" in note and "0.1" in note for note in notes)
    assert any("too large" in note and "1e+03" in note for note in notes)


@pytest.mark.parametrize("sigma", [1e-80, 1e80])
def test_extreme_embeddings_are_marked(sigma: float) -> None:
    config = {"width": 4, "norm": "none", "sigma": sigma, "seed": 0, "pairs": False}
    found = named_marks(growth.measure(config))["norms"]
    assert found["Q"][0] in (UNDERFLOW, "inf") or math.isfinite(found["Q"][0])
    json.dumps(found, allow_nan=False)
    if sigma < 1:
        assert found["Q"][0] == UNDERFLOW
    assert found["V"][1] == 0.0


def test_a_law_is_fitted_where_the_curve_is_one() -> None:
    x = torch.logspace(-3, 1, 17, dtype=torch.float64)
    curve = x**3 / (1 + x) ** 2
    law = Sweep(tuple(x.tolist()), torch.stack([curve, 2 * curve])).fitted("a", 3)
    assert law.predicted == 3
    assert law.slope == pytest.approx(3, abs=0.05)
    assert law.window[0] == pytest.approx(1e-3)
    assert law.window[1] < 0.1
    assert law.flattest < 1.5 < 2.95 < law.steepest


def test_repeats_that_lack_a_place_do_not_count() -> None:
    records = [Record("e", 1, {"sigma": s, "seed": k}, {"n": s}) for k, s in ((0, 1.0), (0, 2.0), (1, 1.0))]
    line = sweep(records, "sigma", "n")
    assert line.x == (1.0, 2.0)
    assert line.values.shape == (1, 2)


def test_the_band_is_the_interval_of_the_mean() -> None:
    values = torch.tensor([[1.0], [4.0], [2.0], [2.0], [2.0]], dtype=torch.float64)
    curve = Sweep((1.0,), values).curve("")
    assert curve.low is not None
    assert curve.high is not None
    half = 2.7764451051978 * values.log().std(0).item() / math.sqrt(5)
    assert curve.y[0] == pytest.approx(2)
    assert math.log(curve.high[0] / curve.y[0]) == pytest.approx(half)
    assert math.log(curve.y[0] / curve.low[0]) == pytest.approx(half)
    few = Sweep((1.0,), values[:3]).curve("", shares=True)
    assert (few.low, few.high) == ([1.0], [4.0])
    assert few.y[0] == pytest.approx(7 / 3)


# Claims, references, pages


def test_every_finding_belongs_to_a_claim_and_every_number_has_a_reference() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names)) >= 35
    known = {reference.name for reference in references()[0]}
    assert all(reference.source in references()[1] for reference in references()[0])
    kinds = {experiment.name for experiment in EXPERIMENTS}
    assert {name.split()[0] for name in known} <= kinds


def test_an_unknown_experiment_names_the_nearest() -> None:
    with pytest.raises(CurvlensError, match=r"Did you mean .*'fig3a'"):
        named("fig3")


def test_pictures_are_the_same_for_the_same_numbers() -> None:
    panel = Panel(
        [Curve("a", [1, 2, 3], [1.0, 0.0, 9.0], [0.5, 0.0, 8], [2.0, 0.0, 10.0])],
        [Slope(2, (1, 3), (1, 1), "2")],
        x_scale="log",
        y_scale="log",
    )
    bars = Panel([Curve("b", [0, 1], [1.0, 2.0], [0.5, 1.5], [1.5, 2.5], style="bars")], ticks=([0, 1], ["x", "y"]))
    steps = Panel([Curve("c", [0, 1, 2], [1.0, 2.0], style="steps")])
    heat = Heat([[1.0, math.nan], [2.0, 3.0]], groups=["a", "b"])
    chart = Chart("chart", "title", "caption", [panel, bars, steps, heat])
    one, other = draw(chart), draw(chart)
    assert one == other
    assert set(one) == {"chart.svg", "chart.png"}


def test_the_command_measures_draws_and_judges(tmp_path: Path) -> None:
    results = str(tmp_path / "results")
    runner = CliRunner()
    listed = runner.invoke(app, ["reproduce", "--results", results], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(experiment.name in listed.output for experiment in EXPERIMENTS)
    found = runner.invoke(app, ["reproduce", "fig1", "fig4", "--quick", "--seeds", "2", "--results", results])
    assert found.exit_code == 0, found.output
    said = found.output.replace("\n", " ")
    assert re.search(r"holds when [^:]*: Softmax makes the diagonal blocks indefinite", said), said
    pages = tmp_path / "results" / "quick-2-seeds"
    page = (pages / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(list((pages / "figures").glob("*.svg")))
    assert page.count(">open<") == sum(claim.open for claim in CLAIMS)
    assert page.count(">not measured<") == sum(not claim.open for claim in CLAIMS) - 4
    assert page.rindex(">holds when<") < page.index(">not measured<")  # what was measured comes first
    assert page.count(">undecided<") == 2  # of the four claims two seeds decide two, at least in part
    assert page.count("This cannot be told with 2 seeds") == 2
    assert page.count("Undecided: σ = ") == 1
    text = (pages / "verdicts.md").read_text()
    assert "figures/fig1.svg" in text
    assert (pages / "figures" / "fig4.png").stat().st_size > 5_000
    summary = json.loads((pages / "summary.json").read_text())
    assert set(summary) == {"written by", "settings", "fig1", "fig4"}
    (gap, *_) = (each for each in summary["fig1"]["references"] if each["source"] == "independent")
    assert {"name", "value", "error", "apart", "outcome"} <= set(gap)
    before = (tmp_path / "results" / "fig1.jsonl").read_bytes()
    again = runner.invoke(app, ["reproduce", "verdicts", "--quick", "--seeds", "2", "--results", results])
    assert again.exit_code == 0
    assert (tmp_path / "results" / "fig1.jsonl").read_bytes() == before
    none = runner.invoke(app, ["reproduce", "verdicts", "--seeds", "7", "--results", results])
    assert none.exit_code == 1
    assert "pages of: quick-2-seeds" in none.output.replace("\n", " ")
    nowhere = runner.invoke(app, ["reproduce", "verdicts", "--results", str(tmp_path / "nowhere")])
    assert "There is no folder" in nowhere.output
    both = runner.invoke(app, ["reproduce", "all", "figure3a", "--results", results])
    assert both.exit_code == 1
    wrong = runner.invoke(app, ["reproduce", "figure3a", "--results", results])
    assert wrong.exit_code == 1
    assert "Did you mean" in wrong.output


def test_a_damaged_store_is_told_by_the_command_and_can_be_moved_away(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "fig1.jsonl").write_text("not ours\n")
    runner = CliRunner()
    told = runner.invoke(app, ["reproduce", "--results", str(results)])
    assert told.exit_code == 1
    assert "fig1.jsonl" in told.output.replace("\n", "")
    moved = runner.invoke(app, ["reproduce", "--results", str(results), "--set-aside"])
    assert moved.exit_code == 0
    assert (results / "fig1.jsonl.aside-1").read_text() == "not ours\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_settings_are_plain_and_distinct(experiment: Experiment) -> None:
    for effort in (QUICK, Effort(), Effort(seeds=2)):
        configs = experiment.points(effort)
        assert len({experiment.unit(config).key for config in configs}) == len(configs)
        assert all(isinstance(value, (int, float, str, bool)) for config in configs for value in config.values())
    assert len(experiment.points(Effort(seeds=2))) < len(experiment.points(Effort()))


def test_histograms_count_every_entry() -> None:
    found = entries.measure({"width": 4, "sigma": 0.2, "kind": "softmax", "seed": 0})
    assert sum(found["histogram"]["Q"]) <= 4**4
    assert sum(found["histogram"]["V"]) == 4**4
