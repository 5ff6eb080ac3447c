"""Sentences: each says its numbers, and none is written that the errors do not support."""

from __future__ import annotations

import math
from typing import Any

import pytest

import documents
from curvlens.dynamics.advice import percent, sentences, short


def cell(value: float, stderr: float) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "low": value - 2 * stderr, "high": value + 2 * stderr, "exact": False}


def eigenvalue(value: float, bound: float = 0.0) -> dict[str, Any]:
    return {"value": value, "bound": bound, "low": value - bound, "high": value + bound, "exact": False}


def content(**changes: Any) -> dict[str, Any]:
    names = {"embed": None, "h.0.attn.q": "h.0", "h.0.mlp.up": "h.0", "h.1.attn.q": "h.1", "h.1.mlp.up": "h.1"}
    traces = dict(
        zip(names, (cell(60.0, 2.0), cell(10.0, 1.0), cell(20.0, 1.0), cell(4.0, 0.2), cell(6.0, 0.3)), strict=True)
    )
    means = {name: cell(each["value"] / 100, each["stderr"] / 100) for name, each in traces.items()}
    found: dict[str, Any] = {
        "parameters": 1000,
        "blocks": [
            {"name": name, "layer": layer, "role": name.removeprefix(f"{layer}."), "size": 100}
            for name, layer in names.items()
        ],
        "point": {"loss": 1.0},
        "sanity": {"shuffled_loss": 3.0},
        "cells": {"G": {"trace": traces, "mean": means}, "H": {"trace": traces}},
        "whole": {
            "H": {"top": eigenvalue(20.0, 0.1), "bottom": eigenvalue(-2.0, 0.1), "trace": cell(90.0, 2.0)},
            "G": {"trace": cell(100.0, 1.0)},
        },
        "eigenvectors": [],
        "left": [],
    }
    return found | changes


def said(**changes: Any) -> str:
    return "\n".join(sentence.text for sentence in sentences(content(**changes), None))


def test_where_it_sits() -> None:
    # 60 of 100; the error of the share is √((0.4·2)² + (0.6·√(1+1+.04+.09))²)/100 = 1.2 %
    assert (
        "embed holds 60 ± 1.2 % of the Gauss–Newton trace, in a model with 2 layers and 1 block outside of layers."
        in said()
    )


def test_not_where_a_block_is_missing() -> None:
    some = {"G": {"trace": {"embed": cell(60.0, 2.0)}}}
    assert "of the Gauss–Newton trace" not in said(cells=some)
    assert "traces of 5 of 5 blocks of H" in said(cells=some)


def stages(*names: str) -> list[dict[str, Any]]:
    return [{"stage": name, "seconds": 10.0, "gradients": 1.0} for name in names]


def test_all_that_is_missing_is_named() -> None:
    everything = ("start", "ggn", "ends", "density", "panels", "blocks", "sharp", "block ends", "spectra")
    found = said(cells={}, whole={}, point={}, left=stages(*everything))
    for words in (
        "the loss and its gradient", "the traces of 5 of 5 blocks of H", "the traces of G",
        "the eigenvalues of H and their vectors", "the spectral density of H", "edge of stability",
        "the gradient noise scale", "λ_max of 5 of 5 blocks of H", "densities of single roles and blocks",
        "(about 90 s more)",
    ):  # fmt: skip
        assert words in found
    assert "finer" not in found
    cells = content()["cells"]
    cells["H"]["top"] = {"embed": eigenvalue(1.0)}
    drawn = {"densities": [{"operator": letter, "role": "", "block": ""} for letter in "HG"]}
    later = said(cells=cells, spectrum=drawn, left=stages("spectra", "block ends", "blocks", "ggn"))
    assert (
        "Not told in this budget: finer traces of blocks of H, finer traces of blocks of G, λ_max of 4 of 5 blocks of "
        "H and densities of single roles and blocks (about 40 s more)." in later
    )
    assert "Not told" not in said()


def test_sharpness() -> None:
    assert "λ_max is 20 ± 0.1: plain gradient descent is stable below a learning rate of 0.0995" in said()
    unsure = {"H": {"top": eigenvalue(0.1, 0.5)}}
    assert "gradient descent" not in said(whole=unsure)


def test_negative_curvature() -> None:
    assert "λ_min is −2 ± 0.1, 10 % of λ_max in size" in said()
    none = {"H": {"top": eigenvalue(20.0), "bottom": eigenvalue(-0.01, 0.1)}}
    assert "No negative curvature was found" in said(whole=none)


def test_the_functional_part() -> None:
    assert "The trace of H is 10 ± 2.2 % below that of the Gauss–Newton matrix" in said()
    near = {"H": {"trace": cell(99.0, 2.0)}, "G": {"trace": cell(100.0, 1.0)}}
    assert "equals that of the Gauss–Newton matrix within 4.5 %" in said(whole=near)
    unknown = {"H": {"trace": cell(99.0, 40.0)}, "G": {"trace": cell(100.0, 1.0)}}
    assert "Gauss–Newton matrix" not in said(whole=unknown)


def test_own_steps() -> None:
    assert "differs by a factor of 1.9 between roles" in said()
    steep = content()["cells"]["G"]
    steep["mean"]["h.0.mlp.up"] = cell(7.0, 0.1)
    assert "mlp.up has 50 times the mean curvature per parameter of attn.q" in said(cells={"G": steep})
    steep["mean"]["h.0.mlp.up"] = cell(7.0, 5.0)  # an error of 70 %
    assert "50 times" not in said(cells={"G": steep})


@pytest.mark.parametrize(("shuffled", "warned"), [(3.0, False), (1.0, True), (0.9, True), (None, False)])
def test_shuffled_input(shuffled: float | None, warned: bool) -> None:
    found = sentences(content(sanity={"shuffled_loss": shuffled}))
    assert any(sentence.tone == "bad" for sentence in found) == warned


def test_a_little_higher_is_not_called_not_higher() -> None:
    found = sentences(content(point={"loss": 6.926}, sanity={"shuffled_loss": 6.948}))[0].text
    assert "input (6.95) is not clearly higher than the loss (6.93), which means by more than 2 %." in found
    assert "trained briefly or not at all" in found


@pytest.mark.parametrize(("ratio", "tone"), [(0.3, "good"), (0.95, "warn"), (1.2, "bad")])
def test_the_optimiser(ratio: float, tone: str) -> None:
    found = [
        s for s in sentences(content(stability={"rule": "AdamW", "ratio": ratio, "residual": 0.01})) if "edge" in s.text
    ]
    assert [sentence.tone for sentence in found] == [tone]
    assert "AdamW is at" in found[0].text


def test_far_beyond_the_edge() -> None:
    assert "Adam is at 2700 times its edge of stability" in said(
        stability={"rule": "Adam", "ratio": 2700.0, "residual": 1}
    )


def along(measured: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {"measured": measured, "critical": 3.4, "climbs": False, "certain": True} | changes


def test_the_step_that_comes() -> None:
    def with_step(step: dict[str, Any]) -> str:
        return said(stability={"rule": "AdamW", "ratio": 0.3, "residual": 0.01, "step": step})

    found = with_step(along(eigenvalue(3.1, 0.1)))
    assert "The step of AdamW that comes may be 3.1 ± 0.1 times as long before the loss rises again, by line" in found
    assert "the quadratic model says 3.4" in found
    assert "is too long: it may be 0.5" in with_step(along(eigenvalue(0.5, 0.01)))
    assert "is too long" not in with_step(along(eigenvalue(0.99, 0.02)))
    assert "climbs on this data" in with_step(along(None, climbs=True))
    for nothing in (along(None), along(eigenvalue(3.1, 0.1), certain=False)):
        assert "that comes" not in with_step(nothing)


def test_along_the_gradient_without_an_optimiser() -> None:
    found = said(descent=along(eigenvalue(0.2, 0.01), critical=None))
    assert "Along the gradient the loss rises again at a learning rate of 0.2 ± 0.01" in found
    assert "the quadratic model sees no end" in found


def test_parts_of_the_data() -> None:
    parts = [{"sharpness": eigenvalue(x, 0.1), "trace_H": cell(t, 5.0)} for x, t in ((10.0, 90.0), (30.0, 95.0))]
    found = said(spread=parts)
    assert "Between 2 parts of the data λ_max goes from 10 to 30: the choice of data matters more" in found
    close = [{"sharpness": eigenvalue(x, 0.1)} for x in (20.0, 20.3)]
    assert "parts of the data" not in said(spread=close)
    assert "parts of the data" not in said(spread=[{"loss": 1.0}, {"loss": 9.0}])


def test_noise() -> None:
    assert "noise scale is 40 ± 4 samples" in said(noise={"scale": cell(40.0, 4.0)})
    assert "noise scale" not in said(noise={"scale": cell(40.0, 30.0)})
    assert "noise scale" not in said(noise={"scale": {"value": None, "stderr": None}})


def test_numbers() -> None:
    assert [short(x) for x in (137.46, 20512.0, 3e-5, 0.0, 1.0)] == ["137", "2.05e4", "3e-5", "0", "1"]
    assert [percent(0.712, 0.041), percent(0.0042), percent(1.34, 0.2)] == ["71 ± 4.1 %", "0.42 %", "134 ± 20 %"]
    assert [percent(-0.871, 0.14), percent(0.3, 1.25), percent(25.0, 0.149)] == [
        "−87 ± 14 %",
        "30 ± 120 %",
        "2500 ± 15 %",
    ]


@pytest.mark.parametrize("value", [0.0, None, math.nan, math.inf, 1e300, 1e-320])
def test_numbers_that_no_rule_can_compute_with(value: float | None) -> None:
    """The trace of G is 0 where a softmax is saturated. One rule less, and no other is lost."""
    broken = content()
    broken["whole"]["G"]["trace"] = {**cell(1.0, 1.0), "value": value}
    broken["cells"]["G"]["mean"]["embed"] = {**cell(1.0, 1.0), "value": value, "stderr": value}
    said = " ".join(each.text for each in sentences(broken))
    assert "sharpness" in said
    assert "negative curvature" in said
    assert "nan" not in said
    assert "inf" not in said


def test_some_sentences_are_left_out_but_no_warning() -> None:
    everything = documents.document() | {"sanity": {"accuracy": 0.5, "shuffled_loss": 0.1}}
    whole = sentences(everything, None)
    warned = [each for each in whole if each.tone]
    assert len(whole) > 8
    assert len(sentences(everything)) <= 9  # one is a warning
    assert len(sentences(documents.document())) <= 8
    for most in range(1, len(whole) + 1):
        few = sentences(everything, most)
        assert few == [each for each in whole if each in few]  # in their order
        assert [each for each in few if each.tone] == warned
    assert 1 < len(sentences(everything, 1)) <= 9  # the first of each rule stays
