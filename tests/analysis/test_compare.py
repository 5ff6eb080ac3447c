"""What changed between analyses: differences with errors, sentences that these support, pages and bad input."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import curvlens as cl
from curvlens.analysis import Comparison
from curvlens.analysis.compare_page import page
from curvlens.analysis.differences import clear_among, difference, exactly, number, quotient, said
from curvlens.cli import app
from curvlens.files.seal import origin

NAMES = [
    ("embed", None, "embed"),
    *((f"h.{i}.{role}", f"h.{i}", role) for i in range(2) for role in ("attn.q", "mlp.up")),
]


def sampled(value: float, stderr: float, samples: int = 64) -> dict[str, Any]:
    ends = {"low": value - 2 * stderr, "high": value + 2 * stderr}
    return {"value": value, "stderr": stderr, **ends, "samples": samples, "exact": False}


def bounded(value: float, bound: float) -> dict[str, Any]:
    return {"value": value, "bound": bound, "low": value - bound, "high": value + bound, "exact": False}


def analysis(scale: float = 1.0, **changed: Any) -> dict[str, Any]:
    """A document as analyze writes it, all curvatures multiplied by a scale."""
    traces = {name: sampled(scale * (10.0 + i), 0.2 * scale) for i, (name, _, _) in enumerate(NAMES)}
    tops = {name: bounded(scale * (3.0 + i), 1e-6) for i, (name, _, _) in enumerate(NAMES)}
    grid = [-scale * 10.0**-k for k in range(4)] + [0.0] + [scale * 10.0**-k for k in range(3, -1, -1)]
    share = [0.0, 0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1]
    band = {"low": [max(x - 0.05, 0.0) for x in share], "high": [x + 0.05 for x in share]}
    density = {
        "operator": "H",
        "role": "",
        "block": "",
        "x": grid,
        "share": share,
        **band,
        "probes": 2,
        "n": 500,
        "error": 0.1,
    }
    made: dict[str, Any] = {
        "schema": 1, "name": "GPT", "model": "GPT", "parameters": 500, "dtype": "float64", "device": "cpu",
        "loss_name": "CausalLM()", "family": "reference GPT", "budget": "60s", "seed": 0,
        "blocks": [{"name": n, "layer": layer, "role": r, "size": 100, "parameters": [n]} for n, layer, r in NAMES],
        "point": {"loss": 2.0 / scale, "tokens": 192, "gradient_norm": 0.5},
        "cells": {"H": {"trace": copy.deepcopy(traces), "top": tops}, "G": {"trace": traces}},
        "whole": {
            "H": {
                "trace": sampled(60.0 * scale, 1.0 * scale), "norm": sampled(30.0 * scale, 0.5 * scale),
                "top": bounded(12.1 * scale, 1e-4), "bottom": bounded(-1.0, 1e-4),
                "effective_rank": {"value": 7.0 * scale},
            },
            "G": {"trace": sampled(50.0 * scale, 1.0 * scale)}, "F": {"trace": sampled(10.0 * scale, 1.0 * scale)},
        },
        "spectrum": {"densities": [density], "eigenvalues": {"H": [bounded(-1.0, 1e-4), bounded(12.1 * scale, 1e-4)]}},
        "sentences": [],
    }  # fmt: skip
    return made | changed


def folder(place: Path, document: dict[str, Any], data: str | None = "d") -> Path:
    place.mkdir(parents=True)
    (place / "analysis.json").write_text(json.dumps(document))
    if data is not None:
        identity = {"model": place.name, "data": data}
        (place / "study.json").write_text(json.dumps({"identity": identity}))
    return place


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [folder(tmp_path / "before", analysis()), folder(tmp_path / "after", analysis(2.4))]


# One difference


def plain(found: dict[str, Any]) -> dict[str, Any]:
    known = number(found)
    assert known is not None
    return known


def test_standard_errors_add_in_quadrature() -> None:
    found = difference(plain(sampled(10, 0.3)), plain(sampled(12, 0.4)))
    assert found["value"] == pytest.approx(2)
    assert found["stderr"] == pytest.approx(0.5)
    assert (found["low"], found["high"]) == pytest.approx((1, 3))
    assert found["ratio"] == pytest.approx(1.2)
    assert found["clear"] is True
    assert difference(plain(sampled(10, 0.3)), plain(sampled(10.9, 0.4)))["clear"] is False


def test_bounds_add_up() -> None:
    found = difference(plain(bounded(10, 0.3)), plain(bounded(12, 0.4)))
    assert found["bound"] == pytest.approx(0.7)
    assert found["clear"] is True
    assert difference(plain(bounded(10, 0.5)), plain(bounded(12, 0.6)))["clear"] is False
    assert difference(plain(bounded(10, 0.5)), plain(sampled(12, 0.6)))["bound"] == pytest.approx(1.1)


def test_a_wide_interval_of_few_samples_is_no_change() -> None:
    wide = sampled(14, 0.4) | {"low": 5.0, "high": 40.0}
    assert difference(plain(sampled(10, 0.3)), plain(wide))["clear"] is False
    endless = sampled(14, 0.4) | {"low": None, "high": None}
    found = difference(plain(sampled(10, 0.3)), plain(endless))
    assert found["clear"] is False
    assert found["low"] is None


def test_unknown_errors_and_rounding_are_no_change() -> None:
    assert difference(plain({"value": 1.0}), plain(sampled(9, 0.1)))["clear"] is None
    assert difference(plain({"value": 1.0, "stderr": None}), plain(sampled(9, 0.1)))["clear"] is None
    one, other = exactly(1.0), exactly(1.0 + 1e-7)
    assert one is not None
    assert other is not None
    assert difference(one, other, 1e-5)["clear"] is False
    assert difference(one, other, 1e-12)["clear"] is True
    assert difference(one, one)["clear"] is False


def test_ratios_need_numbers_clear_of_zero() -> None:
    assert difference(plain(sampled(1, 0.6)), plain(sampled(9, 0.1)))["ratio"] is None
    assert difference(plain(sampled(1, 0.1)), plain(sampled(-9, 0.1)))["ratio"] is None
    assert difference(plain(sampled(-1, 0.1)), plain(sampled(-9, 0.1)))["ratio"] == pytest.approx(9)


def test_the_best_of_many_needs_more() -> None:
    found = difference(plain(sampled(10, 0.3)), plain(sampled(11.3, 0.4)))  # 2.6 σ
    assert found["clear"]
    assert clear_among(found, 1)
    assert not clear_among(found, 100)


def test_differences_cover_at_their_rate() -> None:
    """Two equal numbers, measured often: about 1 in 20 differences is beyond 2 σ."""
    draws = random.Random(0)
    beyond = sum(
        bool(difference(plain(sampled(draws.gauss(5, 1), 1)), plain(sampled(draws.gauss(5, 2), 2)))["clear"])
        for _ in range(4000)
    )
    assert 0.035 < beyond / 4000 < 0.056


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "3", True, [], {"value": []}, 10**400])
def test_what_is_no_number_is_not_measured(value: Any) -> None:
    assert number({"value": value}) is None
    assert number(value) is None


def test_quotients_have_errors() -> None:
    found = quotient(plain(sampled(10, 1)), plain(sampled(50, 1)))
    assert found is not None
    assert found["stderr"] == pytest.approx(math.hypot(1 / 50, 10 / 50**2))
    assert quotient(plain(sampled(10, 1)), plain(sampled(0, 1))) is None


# Sentences


def test_what_changed_is_said_with_its_numbers(pair: list[Path]) -> None:
    found = cl.compare(pair)
    assert isinstance(found, Comparison)
    assert found.names == ["before", "after"]
    assert "The sharpness λ_max rose from 12.1 to 29 (× 2.4)." in found.sentences
    assert "The loss fell from 2 to 0.833 (× 0.42)." in found.sentences
    text = "\n".join(found.sentences)
    assert "The trace of G changed in 5 of 5 blocks" in text
    assert "in h.1.mlp.up it rose from 14 ± 0.2 to 33.6 ± 0.48 (× 2.4)" in text
    assert "Not judged, since the errors are not known: effective rank" in text
    assert "No change beyond the errors: λ_min of H, the functional share tr F / tr G, the gradient norm." in text
    assert str(found).startswith("Comparison of before, after\n  The loss fell")


def test_no_change_is_said_and_nothing_else(tmp_path: Path) -> None:
    shifted = analysis()
    shifted["cells"]["H"]["trace"]["embed"]["value"] += 0.2
    found = cl.compare([folder(tmp_path / "a", analysis()), folder(tmp_path / "b", shifted)])
    assert not [text for text in found.sentences if "rose" in text or "fell" in text or "Also changed" in text]
    assert "No cell of H changed by more than its error, of 10 that were compared." in found.sentences


def test_the_largest_change_is_named_if_it_stands_out(tmp_path: Path) -> None:
    shifted = analysis()
    shifted["cells"]["G"]["trace"]["h.0.mlp.up"] = sampled(40, 0.3)
    found = cl.compare([folder(tmp_path / "a", analysis()), folder(tmp_path / "b", shifted)])
    text = "\n".join(found.sentences)
    assert "changed in 1 of 5 blocks by more than 2 σ, no more than by chance, most in h.0.mlp.up: it rose" in text


def test_a_course_over_checkpoints(tmp_path: Path) -> None:
    scales = {"step0": 1.0, "step1": 2.0, "step2": 4.0, "step3": 3.0}
    found = cl.compare([folder(tmp_path / name, analysis(scale)) for name, scale in scales.items()])
    text = "\n".join(found.sentences)
    assert "The sharpness λ_max is higher on the way: 48.4 at step2, beside 12.1 at step0 and 36.3 at step3." in text
    rising = cl.compare([tmp_path / name for name in ("step0", "step1", "step2")])
    assert (
        "At each of the 2 steps the loss falls, the sharpness λ_max rises, the Gauss–Newton trace rises."
        in rising.sentences
    )
    assert len(rising.content["layers"]["G"]["trace"]["h.0"]) == 3
    assert rising.content["layers"]["G"]["trace"]["h.0"][1]["value"] == pytest.approx(2 * (11 + 12))
    html = page(rising.content)
    assert "h.0 at step1" in html
    assert "Course" in html


# What can be compared


def test_what_differs_beside_the_weights_is_said(tmp_path: Path) -> None:
    other = analysis(loss_name="MSE()", dtype="float32", parameters=600)
    other["blocks"][1]["size"] = 200
    other["blocks"][2]["name"] = "h.0.mlp.gate"
    found = cl.compare([folder(tmp_path / "a", analysis()), folder(tmp_path / "b", other, data="e")])
    notes = "\n".join(found.content["notes"])
    assert "different data" in notes
    assert "loss function (a: CausalLM(); b: MSE())" in notes
    assert "dtype" in notes
    assert "4 of 6 blocks are in all analyses. Not compared: 'h.0.mlp.up', 'h.0.mlp.gate'." in notes
    assert "1 blocks have another number of parameters: 'h.0.attn.q'" in notes
    assert found.sentences[0].startswith("The analyses have different data")


def test_unknown_data_and_equal_weights_are_said(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", analysis()), folder(tmp_path / "b", analysis(), data=None)
    assert "not known" in cl.compare([a, b]).content["notes"][0]
    (b / "study.json").write_text((a / "study.json").read_text())
    assert "the same weights" in cl.compare([a, b]).content["notes"][0]


def test_names(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "x" / "run", analysis()), folder(tmp_path / "y" / "run", analysis(2.0))]
    assert cl.compare(paths).names == ["x/run", "y/run"]
    assert cl.compare(paths, names=["one", "two"]).names == ["one", "two"]
    for wrong in (["one"], ["one", "one"], ["one", ""], "ab"):
        with pytest.raises(cl.CurvlensError, match="names= needs 2 different names"):
            cl.compare(paths, names=wrong)


# Files


def test_the_files(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    found = cl.compare(pair, out)
    assert found.page == out
    cl.compare(pair, out)  # ours, so it is replaced
    for kind in (".html", ".json", ".csv"):
        assert origin(kind, out.with_suffix(kind).read_bytes()) == "ours"
    stored = json.loads(out.with_suffix(".json").read_text())
    assert stored["sentences"] == found.content["sentences"]
    rows = list(csv.DictReader(io.StringIO(out.with_suffix(".csv").read_text())))
    assert len(rows) == len(found.table()) == len(found.to_pandas())
    [sharpness] = [row for row in rows if (row["operator"], row["quantity"], row["block"]) == ("H", "top", "")]
    assert float(sharpness["difference"]) == pytest.approx(12.1 * 1.4)
    assert (sharpness["from"], sharpness["to"], sharpness["clear"], sharpness["error_is"]) == (
        "before",
        "after",
        "True",
        "bound",
    )
    assert page(found.content) == page(json.loads(json.dumps(found.content)))


def test_an_atom_at_0_is_counted_and_drawn(tmp_path: Path) -> None:
    """A node at 3e-6 that stands for eigenvalues that are 0: in no curve, in the share left out, and a circle."""
    document = analysis()
    density = document["spectrum"]["densities"][0]
    floor = 1e-5
    density |= {
        "operator": "G", "x": [-1.0, -1e-6, 0.0, 1e-6, floor, 1.0], "share": [0.0, 0.0, 0.01, 0.6, 0.39],
        "low": [0.0, 0.0, 0.0, 0.55, 0.3], "high": [0.0, 0.0, 0.02, 0.65, 0.4], "atoms": [[3e-6, 0.5], [0.9, 0.01]],
        "marked": [{"at": 0.0, "value": 0.5, "stderr": 0.02, "exact": False}],
    }  # fmt: skip
    found = cl.compare([folder(tmp_path / name, document) for name in ("a", "b")], tmp_path / "compare.html")
    drawn = found.content["spectra"][0]["densities"]["G"]
    assert drawn["middle"] == pytest.approx(0.51)
    assert drawn["bins"][1][2:] == pytest.approx([0.1, 0.05, 0.15])  # of a decade
    text = (tmp_path / "compare.html").read_text()
    assert "and the atom at 0: 51 % in a, 51 % in b." in text
    assert "at least 50 ± 2 % of all eigenvalues are 0 in a" in text
    assert "share of the atom" in text


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    document = json.loads(json.dumps(analysis()).replace("h.0.attn.q", bad))
    found = cl.compare([folder(tmp_path / str(i), document) for i in range(3)], names=[bad, f"{bad}2", f"{bad}3"])
    html = page(found.content)
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    assert html.count("</script>") == html.count('<script id="data"') + html.count("<script>")


def test_the_command(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "c.html"
    done = CliRunner().invoke(app, ["compare", *map(str, pair), "--out", str(out), "--names", "one,two"])
    assert done.exit_code == 0, done.output
    assert "The sharpness λ_max rose from 12.1 to 29 (× 2.4)." in done.output
    assert "not clear" in done.output
    assert "two" in done.output
    assert out.exists()
    refused = CliRunner().invoke(app, ["compare", str(pair[0]), "--out", str(out)])
    assert refused.exit_code == 1
    assert "needs two or more folders" in refused.output


# Bad input


def test_one_folder_is_not_enough(pair: list[Path]) -> None:
    for few in ([], [pair[0]], pair[0], str(pair[0])):
        with pytest.raises(cl.CurvlensError, match=r"compare needs two or more folders .* Give another"):
            cl.compare(few)  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="got a list"):
        cl.compare([1, 2])  # type: ignore[list-item]
    with pytest.raises(cl.CurvlensError, match="is given twice"):
        cl.compare([pair[0], pair[0]])


def test_a_folder_without_an_analysis(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(cl.CurvlensError, match="is no folder of an analysis"):
        cl.compare([pair[0], tmp_path])


def test_an_analysis_of_another_schema(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(cl.CurvlensError, match="is no analysis that this version reads"):
        cl.compare([pair[0], folder(tmp_path / "new", analysis(schema=99))])


def test_no_block_in_common(pair: list[Path], tmp_path: Path) -> None:
    other = analysis(blocks=[{"name": "conv", "layer": None, "role": "conv", "size": 3, "parameters": []}])
    with pytest.raises(cl.CurvlensError, match=r"no block in common: 'before' has 'embed'.*'conv'"):
        cl.compare([pair[0], folder(tmp_path / "cnn", other)])


def test_foreign_files_are_not_overwritten(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    out.with_suffix(".json").write_text("{}")
    with pytest.raises(cl.CurvlensError, match=r"was not written by curvlens.*out='other.html'"):
        cl.compare(pair, out)
    assert not out.exists()
    with pytest.raises(cl.CurvlensError, match="is no name of a page"):
        cl.compare(pair, tmp_path / "compare.pdf")
    with pytest.raises(cl.CurvlensError, match="there is no folder"):
        cl.compare(pair, tmp_path / "none" / "compare.html")


def test_damaged_documents_are_refused_or_read_in_part(pair: list[Path], tmp_path: Path) -> None:
    """Anything in the place of any value: a plain error, or a comparison of the rest that can be drawn."""
    draws, read = random.Random(0), 0
    junk: tuple[Any, ...] = (None, True, -1, 10**300, math.nan, "", "x", [], {}, [[]], {"value": "x"}, {"value": 1.0})
    target = folder(tmp_path / "bad", analysis())
    for _ in range(150):
        document: Any = analysis(1.3)
        place: Any = document
        while True:
            key = draws.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], (dict, list)) or not place[key] or draws.random() < 0.3:
                break
            place = place[key]
        place[key] = draws.choice(junk)
        (target / "analysis.json").write_text(json.dumps(document))
        try:
            found = cl.compare([pair[0], target])
        except cl.CurvlensError:
            continue
        read += 1
        json.dumps(found.content, allow_nan=False)
        page(found.content) if read % 10 == 0 else None
        found.table()
    assert read > 50


# A real pair


def test_two_real_analyses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = (torch.randn(12, 4).double(), torch.randint(0, 3, (12,)))
    steeper = copy.deepcopy(model)
    with torch.no_grad():
        steeper.get_parameter("2.weight").mul_(5)
    for name, each in (("model", model), ("steeper", steeper)):
        cl.analyze(cl.Problem(each, data, cl.losses.CrossEntropy()), tmp_path / name, "200 gradients")
    found = cl.compare([tmp_path / "model", tmp_path / "steeper"], tmp_path / "compare.html")
    assert not found.content["notes"]
    tops = [
        float(cl.eigs(cl.hessian(cl.Problem(m, data, cl.losses.CrossEntropy())), k=1).values[0])
        for m in (model, steeper)
    ]
    change = found.content["differences"][0]["whole"]["H.top"]
    assert change["value"] == pytest.approx(tops[1] - tops[0], abs=change["bound"] + 1e-9)
    assert change["clear"]
    assert any(text.startswith("The sharpness λ_max rose") for text in found.sentences)


def test_numbers_are_said_with_their_errors() -> None:
    assert said(plain(sampled(12.134, 0.21))) == "12.1 ± 0.21"
    assert said({"value": 3.0, "exact": False}) == "3"
