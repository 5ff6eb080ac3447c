"""The page of an analysis as HTML: what it holds, what it says without charts, and that names are text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import curvlens as cl
import documents
from curvlens.analysis import charts, drawer, figures
from curvlens.analysis.document import curve
from curvlens.analysis.numbers import number, said
from curvlens.analysis.page import page
from curvlens.analysis.result import Analysis, load_analysis
from curvlens.dynamics.advice import where_it_sits
from curvlens.report.content import Number
from subjects import problem

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"quoted\" 'twice' & `once` $& {}",
    "two\nlines\r\tand \x1b[31m",
    "right-to-left \u202eback",
    "half a surrogate \ud83d",
    "x" * 10_000,
    "many words " * 1000,
)
TITLES = (
    "What this says", "Layer × role", "Spectrum", "Stability", "Where it comes from", "Eigenvectors", "Along depth",
    "Attention", "Noise and data", "How it was made",
)  # fmt: skip


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of ``curvlens[report]`` are not installed."""
    for name in ("altair", "vl_convert"):
        monkeypatch.setitem(sys.modules, name, None)


def data_of(made: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', made, re.S)
    assert found
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_a_page_has_all_sections_in_order_and_every_sentence_with_its_link() -> None:
    made = page(documents.document())
    assert tuple(re.findall(r"<h2 id[^>]*>([^<]*)</h2>", made)) == TITLES
    assert "embed holds 64 ± 1 % of the trace." in made
    assert '<a href="#heat">→ layer × role</a>' in made
    assert "doctor: no errors, 1 note" in made
    assert "1 note · ◐ 1 of 209 cells" in re.sub(r"<[^>]+>", "", made)
    assert "1 of 209 cells not measured in this budget" in made
    assert "sharpness λ_max 12.5" in made
    assert len(data_of(made)["charts"]) == 15


def test_the_top_of_a_minimal_page() -> None:
    content = documents.document() | {"minimal": True, "ended": "interrupted", "doctor": None}
    made = page(content)
    assert tuple(re.findall(r"<h2 id[^>]*>([^<]*)</h2>", made)) == (
        "What this says",
        "Layer × role",
        "Spectrum",
        "How it was made",
    )
    assert "This analysis was interrupted" in made
    assert "doctor:" not in made


def test_what_was_not_measured_says_so() -> None:
    content = documents.document()
    nothing: dict[str, Any] = {
        "cells": {},
        "whole": {},
        "heads": {},
        "eigenvectors": [],
        "depth": {},
        "spread": [],
        "sentences": [],
    }
    nothing |= {"spectrum": {"densities": [], "eigenvalues": {}}}
    for name in (
        *("point", "sanity", "stability", "descent", "attention", "noise", "heterogeneity", "doctor", "profile"),
    ):
        del content[name]
    made = page(content | nothing)
    assert made.count("Not measured in this budget.") == 6
    assert "vegaEmbed" not in made


def test_without_its_packages_a_page_has_no_charts_and_says_how_to_get_them(no_charts: None, tmp_path: Path) -> None:
    content = documents.document()
    assert not charts.available()
    made = page(content)
    assert "pip install &#x27;curvlens[report]&#x27;" in made
    assert "data-chart" not in made
    assert 'data-heat="0"' in made
    assert made.count("<table>") >= 10
    assert len(made.encode()) < 150_000
    Analysis(content, str(tmp_path)).write()
    assert (tmp_path / "index.html").read_text() == made
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name: str) -> None:
    plain, made = page(documents.document()), page(documents.document(name=name, block=name, token=name))
    count = {tag: len(re.findall(rf"<{tag}[\s>]", plain)) for tag in ("script", "img", "table", "section", "p")}
    assert count == {tag: len(re.findall(rf"<{tag}[\s>]", made)) for tag in count}
    text = made.replace(charts_script(made), "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
    made.encode()
    if len(name) > 200:
        assert '<span class="clip" title="' in made
        assert re.search(r'<h1 title="', made)
        # charts have short names
        assert (
            max(
                len(word)
                for word in re.findall(r'"name": "(.*?)"', json.dumps(data_of(made)["charts"], ensure_ascii=False))
            )
            <= 60
        )


def charts_script(made: str) -> str:
    """Vega, the largest script."""
    scripts: list[str] = re.findall(r"<script>(.*?)</script>", made, re.S)
    return max(scripts, key=len)


def test_a_page_of_three_hundred_blocks_is_small() -> None:
    content = documents.document(n_layer=38, spectra=True)
    assert len(content["blocks"]) > 300
    assert len(page(content).encode()) < 2_000_000


def test_numbers_have_three_digits_and_errors_two() -> None:
    assert number(documents.estimate(123.456, 0.1234)) == Number("123", "15", 123.456)
    assert number(documents.eigenvalue(28.7405, 1e-9)) == Number("28.7", "", 28.7405)
    assert number(documents.estimate(2.0, 0.0)) == Number("2 exact", "", 2.0)
    assert number({"value": None}) == number(None) == ""
    assert said(documents.estimate(-20512.3, 0.01)) == "−2.05e4 ± 210"


def test_optimisers_are_beside_their_edge() -> None:
    made = data_of(page(documents.document()))["charts"]
    edge = next(spec for spec in made if "share of the edge" in json.dumps(spec))
    names = [record["name"] for record in edge["layer"][0]["data"]["values"]]
    assert names[0] == "AdamW"
    assert "gradient descent, lr 0.001" in names
    assert "19 ± 1 %" in json.dumps(edge, ensure_ascii=False)


def test_a_verdict_is_no_half_sentence() -> None:
    advice = {
        "observation": "λ_min is −2.", "recommendation": "Use momentum.", "reason": "seen", "panel": "spectrum",
        "claim": "advice-momentum", "verdict": "holds when",
    }  # fmt: skip
    assert "advice-momentum: holds in part" in page(documents.document() | {"advice": [advice]})


def test_a_line_is_a_smooth_parabola_near_where_loss_and_model_part() -> None:
    sizes = [0.01, 0.012, 0.02, 0.1, 0.4]
    radii = [*(-t for t in reversed(sizes)), 0.0, *sizes]
    line = {
        "radii": radii, "losses": [7.0 + 5 * t * t + 40 * t**3 for t in radii],
        "slope": 0.25, "curvature": 10.0, "forward": 0.01, "forward_open": False, "backward": 0.012,
        "backward_open": False,
    }  # fmt: skip
    shown = charts.lines([("top", line)])["data"]["values"]
    assert shown is not None
    assert max(abs(record["t"]) for record in shown) == 0.02  # the first beyond 1.5 times the larger radius
    model = [record for record in shown if record["kind"] == "quadratic model"]
    assert len(model) > 100
    assert model[0]["loss"] == pytest.approx(7.0 - 0.25 * 0.02 + 5 * 0.02**2)
    assert [record["t"] for record in shown if record["kind"] == "radius"] == [-0.012, 0.01]
    none = charts.lines([("top", {**line, "forward": 0.0, "backward": 0.0})])
    assert max(record["t"] for record in none["data"]["values"]) == 0.4


def words_of(made: str) -> str:
    """The text of a page without its tags."""
    return re.sub(r"<[^>]+>", "", made)


def test_the_step_that_comes_and_what_leaves_first() -> None:
    made = words_of(page(documents.document()))
    assert "The step that comes may be 3.1 ± 0.1 times as long before the loss rises again (line search)" in made
    assert "the quadratic model says 3.4." in made
    assert "Second moments taken as g² at this point: the optimiser has none yet." in made
    assert "What leaves first with the optimiser" in made
    content = documents.document()
    content["stability"]["step"] |= {"climbs": True, "measured": None, "critical": 0.0}
    assert "The step that comes climbs" in words_of(page(content))
    content["stability"]["step"] |= {"climbs": False, "critical": None}
    assert "does not rise again up to 6.8 steps; the quadratic model has no end" in words_of(page(content))
    del content["stability"]["step"]
    assert "The step that comes" not in words_of(page(content))


def test_without_an_optimiser_adam_is_measured_at_this_point() -> None:
    content = documents.document()
    adam = content.pop("stability") | {"largest_rate": documents.eigenvalue(0.005, 1e-4)}
    content["adam"] = {**adam, "rule": "Adam"}
    made = page(content)
    spec = next(each for each in data_of(made)["charts"] if "largest stable learning rate" in json.dumps(each))
    shown = {record["name"]: record for record in spec["layer"][0]["data"]["values"]}
    assert list(shown) == ["gradient descent", "momentum 0.9", "Nesterov 0.9", "Adam, v̂ = g²"]
    assert shown["gradient descent"]["value"] == 2 / 12.5
    assert shown["Adam, v̂ = g²"]["said"] == "0.005 ± 1e-4"
    assert [record["at"] for record in shown.values()] == [record["high"] for record in shown.values()]
    assert spec["layer"][0]["encoding"]["x"]["scale"]["domain"][1] < 2.0  # the last mark is at 0.3
    assert "η where the loss rises again" in words_of(made)
    assert "Second moments taken as g² at this point" in words_of(made)
    assert "--optimizer optimizer.pt" in words_of(made)


def test_gap_condition_number_and_atoms() -> None:
    made = page(documents.document())
    assert "spectral gap λ₁ − λ₂" in words_of(made)
    assert "condition number on the span of the 20 largest eigenvalues (2 % of all)" in words_of(made)
    assert "40 (30 to 60)" in words_of(made)
    assert "at least 83 ± 1 % of all eigenvalues are 0, to 1e-5 of the largest" in words_of(made)
    densities = [each for each in data_of(made)["charts"] if "share of the atom" in json.dumps(each)]
    assert len(densities) == 1


def test_parts_of_the_data_stand_beside_all_of_it() -> None:
    made = page(documents.document())
    table = made[made.index('aria-label="spread"') :].split("</table>")[0]
    rows = [words_of(row) for row in table.split("<tr>")]
    assert "λ_max of H" in rows[1]
    assert rows[2].startswith("part 1")
    assert "11" in rows[2]
    assert "70 ± 3.5" in rows[2]
    assert rows[-1].startswith("all1.72")
    assert "80 ± 8" in rows[-1]


def test_figures_are_written_beside_the_page(tmp_path: Path) -> None:
    content = documents.document()
    Analysis(content, str(tmp_path)).write()
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    expected = {f"heat-{letter}-trace" for letter in "HGF"} | {"heat-H-norm", "heat-G-norm"}
    expected |= {"spectrum", "roles", "stability", "parts", "lines", "depth", "norms"}
    expected |= {f"attention-{kind}" for kind in ("evenness", "sink", "largest")}
    assert names == {f"{name}.{kind}" for name in expected for kind in ("svg", "png")}
    assert all(file.stat().st_size > 1000 for file in (tmp_path / "figures").iterdir())
    assert load_analysis(tmp_path).content == content


def test_figures_of_hostile_names(tmp_path: Path) -> None:
    content = documents.document(block="<script>" + "x" * 10_000 + "\ud83d")
    spec = dict(figures.figures(content))["heat-G-trace"]
    assert len(json.dumps(spec)) < 100_000


@pytest.mark.parametrize("value", [None, 1e300, float("inf")])
def test_a_section_that_cannot_be_drawn_leaves_the_others(value: float | None) -> None:
    content = documents.document()
    for name in content["point"]["gradient_by_block"]:
        content["point"]["gradient_by_block"][name] = 1e300  # their squares overflow
    for each in content["spectrum"]["densities"]:
        each["x"] = [value] * len(each["x"])
    made = page(content)
    assert made.count("cannot be drawn from its numbers") == (1 if value == 1e300 else 2)
    for title in TITLES[5:6] + TITLES[7:]:
        assert title in made
    assert [name for name, _ in figures.figures(content)][:1] == ["heat-H-trace"]


def test_the_effective_rank_of_a_block_is_that_of_its_trace_and_norm() -> None:
    content = documents.document()
    cells = content["cells"]["G"]
    cells["trace"] = {"h.0.mlp.up": documents.estimate(12.0, 0.01)}
    cells["norm"] = {"h.0.mlp.up": documents.estimate(6.0, 0.02)}  # like four equal eigenvalues
    assert ("effective rank of G, (tr G)²/‖G‖²_F", "4 ± 0.24") in drawer.facts(content, content["blocks"][7])
    del cells["norm"]["h.0.mlp.up"]
    assert "effective rank" not in str(drawer.facts(content, content["blocks"][7]))


def test_eigenvectors_between_the_ends_are_one_fold() -> None:
    content = documents.document()
    bottom, top = content["eigenvectors"]
    content["eigenvectors"] = [{**bottom, "number": i} for i in range(9)] + [{**top, "number": 9}]
    made = page(content)
    order = [made.index(f'id="eigenvector{each}"') for each in ("-9", "-0", "s-between", "-8", "-1")]
    assert order == sorted(order)
    assert "8 eigenvectors between these" in made


def test_no_band_below_zero_where_no_eigenvalue_can_be() -> None:
    G = cl.ggn(problem())
    density = cl.density(G, probes=2, steps=20)
    free, bound = curve(density), curve(density, psd=True)
    below = [i for i, x in enumerate(bound["x"][1:]) if x <= 0]
    assert below
    assert all(bound[name][i] == 0 for name in ("share", "low", "high") for i in below)
    assert any(free["high"][i] > 0 for i in below)
    assert [x for i, x in enumerate(bound["high"]) if i not in below] == free["high"][len(below) :]


def test_a_tied_block_is_named_with_its_other_name() -> None:
    content = documents.document()
    for block in content["blocks"]:
        block["also"] = ["unembed"] if block["name"] == "embed" else []
    content["cells"]["G"]["trace"]["embed"] = documents.estimate(1e4, 0.01)
    (sentence,) = list(where_it_sits(content))
    assert sentence.text.startswith("embed (also unembed)")
