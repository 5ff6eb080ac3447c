"""Recommendations: given only if the numbers support the observation and the verdict the advice."""

from __future__ import annotations

from typing import Any

import pytest

from curvlens.dynamics import recommendations as module
from curvlens.dynamics.recommendations import Recommendation, recommendations
from curvlens.papers import CLAIMS
from test_advice import cell, content, eigenvalue


def whole(**changes: Any) -> dict[str, Any]:
    numbers = {"top": eigenvalue(20.0, 0.1), "bottom": eigenvalue(-2.0, 0.1)}
    condition = {"value": 500.0, "low": 300.0, "high": 900.0, "directions": 10, "share": 0.01}
    return {"H": numbers | {"condition": condition} | changes}


def row(claim: str, **changes: Any) -> Recommendation:
    return next(each for each in recommendations(content(**changes)) if each.claim == claim)


def test_every_claim_is_on_the_verdict_page() -> None:
    assert {each.claim for each in module.TABLE} == set(module.VERDICTS)
    assert set(module.VERDICTS) <= {claim.name for claim in CLAIMS}


def test_a_high_condition_number() -> None:
    found = row("advice-adaptive", whole=whole())
    assert found.recommendation == "Use an adaptive optimiser, such as Adam."
    assert "on the span of its 10 largest eigenvalues is 500 (300 to 900)" in found.observation
    low = {"value": 5.0, "low": 3.0, "high": 9.0, "directions": 10}
    assert row("advice-adaptive", whole=whole(condition=low)).reason == "it is not the case here"
    wide = {"value": 90.0, "low": 30.0, "high": 300.0, "directions": 10}
    unsure = row("advice-adaptive", whole=whole(condition=wide))
    assert (unsure.recommendation, unsure.reason) == ("", "the errors do not tell")
    missing = row("advice-adaptive", whole={})
    assert (missing.recommendation, missing.observation) == ("", "Not known: no condition number in this budget.")


def test_negative_curvature() -> None:
    assert row("advice-momentum").recommendation == "Use momentum."
    assert "10 % of λ_max in size" in row("advice-momentum").observation
    assert row("advice-momentum", whole=whole(bottom=eigenvalue(0.1, 0.01))).recommendation == ""
    assert row("advice-momentum", whole=whole(bottom=eigenvalue(-0.1, 0.5))).reason == "the errors do not tell"
    assert row("advice-momentum", whole=whole(bottom=None)).observation.startswith("Not known")


def layered(first: float, second: float, error: float = 0.1) -> dict[str, Any]:
    names = ["embed", "h.0.attn.q", "h.0.mlp.up", "h.1.attn.q", "h.1.mlp.up"]
    values = dict(zip(names, (60.0, first / 2, first / 2, second / 2, second / 2), strict=True))
    traces = {name: cell(value, error) for name, value in values.items()}
    return {"G": {"trace": traces, "mean": {}}, "H": {"trace": traces}}


def test_what_is_not_seen_to_help_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = row("advice-layerwise", cells=layered(10.0, 90.0))
    assert found.recommendation == ""
    assert "the article recommends: give each layer" in found.reason
    assert "h.1 has 9 (8.7 to 9.3) times the mean curvature per parameter of h.0" in found.observation
    monkeypatch.setattr(module, "VERDICTS", {**module.VERDICTS, "advice-layerwise": ("holds", "")})
    assert row("advice-layerwise", cells=layered(10.0, 90.0)).recommendation.startswith("Give each layer")
    assert row("advice-layerwise", cells=layered(10.0, 11.0)).reason == "it is not the case here"
    assert row("advice-layerwise", cells=layered(10.0, 19.0, 3.0)).reason == "the errors do not tell"
    only = {"G": {"trace": {"embed": cell(1.0, 0.1)}}}
    assert row("advice-layerwise", cells=only).observation.startswith("Not known")


def test_growth_along_depth() -> None:
    assert (
        "The trace of h.1 is 9 (8.7 to 9.3) times that of h.0."
        in row("depth-growth", cells=layered(10.0, 90.0)).observation
    )
    assert "use pre-ln" in row("depth-growth", cells=layered(10.0, 90.0)).reason
    assert row("depth-growth", cells=layered(90.0, 10.0)).reason == "it is not the case here"
    assert row("depth-growth", cells=layered(-90.0, 10.0)).observation.startswith("Not known")


def test_numbers_beyond_the_range_of_floats_lose_one_row_only() -> None:
    found = recommendations(content(whole=whole(condition={"value": None, "low": None, "high": 1.0, "directions": 3})))
    assert found[0].observation.startswith("Not known")
    assert found[1].recommendation == "Use momentum."
