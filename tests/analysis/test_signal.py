"""The noise scale of a page: not known where the gradient cannot be told from its noise."""

from __future__ import annotations

from typing import Any

import pytest

import documents
from curvlens.analysis.compare_page import page as compare_page
from curvlens.analysis.compared import compared
from curvlens.analysis.page import page
from curvlens.analysis.signal import NO_SIGNAL, TOO_COARSE, noise_of


def measured(square: float, error: float, scale: float = 40.0, scale_error: float = 10.0) -> dict[str, Any]:
    """As the instrument stores it: value, error, samples, degrees of freedom, on the logarithm, computed part."""
    return {
        "trace": [27.0, 2.0, 20.0, 19.0, 1.0, 0.0],
        "gradient": [square, error, 20.0, 19.0, 1.0, 0.0],
        "scale": [scale, scale_error, 20.0, 19.0, 1.0, 0.0],
        "scales": {"sure": [40.0, 10.0, 20.0, 19.0, 1.0, 0.0], "coarse": [40.0, 41.0, 20.0, 19.0, 1.0, 0.0]},
        "samples": 20, "unit": "sample", "note": "",
    }  # fmt: skip


@pytest.mark.parametrize(("square", "error", "known"), [(1.0, 0.1, True), (1.0, 0.45, True), (1.0, 0.5, False)])
def test_a_scale_is_known_where_the_interval_of_the_square_is_above_0(square: float, error: float, known: bool) -> None:
    found = noise_of(measured(square, error))  # t(19) is 2.09
    assert found["gradient"]["low"] == pytest.approx(square - 2.093 * error, abs=1e-3)
    assert found["scale"]["value"] == (40.0 if known else None)
    assert found["scale"].get("why") == (None if known else NO_SIGNAL)


def test_a_negative_square() -> None:
    found = noise_of(measured(-1.0, 0.1, float("nan"), float("nan")))
    assert found["gradient"]["value"] == -1.0
    assert (found["scale"]["value"], found["scale"]["why"]) == (None, NO_SIGNAL)


def test_a_block_is_not_known_where_its_error_is_larger_than_it() -> None:
    scales = noise_of(measured(1.0, 0.1))["scales"]
    assert scales["sure"]["value"] == 40.0
    assert (scales["coarse"]["value"], scales["coarse"]["why"]) == (None, TOO_COARSE)


def test_pages_say_why() -> None:
    analysis = documents.document() | {"noise": noise_of(measured(0.683, 1.42))}
    made = page(analysis)
    assert f"not known: {NO_SIGNAL}" in made
    assert f"not known: {TOO_COARSE}" in made
    assert "‖g‖² without noise, an unbiased estimate (may be negative)" in made
    both = compared([analysis, documents.document()], ["a", "b"], [{}, {}])
    assert both["numbers"]["noise_scale"]["values"][0] is None
    assert both["numbers"]["noise_scale"]["why"] == [NO_SIGNAL, ""]
    assert "noise_scale" not in both["differences"][0]["whole"]
    assert f"not known: {NO_SIGNAL}" in compare_page({**both, "sentences": [], "provenance": {}})
    neither = compared([analysis, analysis], ["a", "b"], [{}, {}])
    assert neither["numbers"]["noise_scale"]["why"] == [NO_SIGNAL, NO_SIGNAL]
