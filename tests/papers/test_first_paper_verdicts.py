"""The first paper's verdicts follow the data: records made up to fulfil a claim, in part, or to contradict it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import made_up
from curvlens.papers import Effort, Finding, Report, named
from curvlens.papers.first_paper import deep_findings, growth
from curvlens.papers.reference import compared
from curvlens.papers.sizes import UNDERFLOW, named_marks
from curvlens.study import Record
from made_up import Result

YES, WHEN, NO, UNDECIDED = "holds", "holds when", "does not hold", "undecided"


def reported(experiment: str, result: Result, seeds: int = 4) -> Report:
    of = named(experiment)
    configs = of.points(Effort(quick=True, seeds=seeds))
    return of.report([Record(of.stored_as, of.revision, c, named_marks(result(c))) for c in configs])


def judged(experiment: str, result: Result, seeds: int = 4) -> dict[str, Finding]:
    report = reported(experiment, result, seeds)
    found = {finding.claim: finding for finding in report.findings}
    for finding in found.values():
        assert bool(finding.regime) == (finding.verdict == WHEN), finding
        assert not re.search(r"\bnan\b", finding.measured + finding.regime), finding
    return found


GROWTH = ("growth-value", "growth-query", "growth-query-outer", "growth-all")
right, wrong = made_up.grown(lambda power: (power, power)), made_up.grown(lambda power: (power - 1, power - 1))
small, large = made_up.grown(lambda power: (power, power - 1)), made_up.grown(lambda power: (power - 1, power))

CASES: list[tuple[str, Result, dict[str, str]]] = [
    ("fig3a", right, dict.fromkeys(GROWTH, YES)),
    ("fig3a", small, dict.fromkeys(GROWTH, WHEN)),
    ("fig3a", large, dict.fromkeys(GROWTH, WHEN)),
    ("fig3a", wrong, dict.fromkeys(GROWTH, NO)),
    ("fig3a", made_up.grown(lambda power: (power, power), "outer"), {"growth-query": NO, "growth-all": YES}),
    ("fig5", right, {"growth-practical": YES}),
    ("fig5", small, {"growth-practical": WHEN}),
    ("fig5", wrong, {"growth-practical": NO}),
    ("fig3b", made_up.pre_ln((-1.0,), (-1.2,)), {"pre-ln": YES}),
    ("fig3b", made_up.pre_ln((0.0, -1.0), (0.0, -1.5)), {"pre-ln": WHEN}),
    ("fig3b", made_up.pre_ln((-1.0,), (-1.2,), below=(6, 3)), {"pre-ln": WHEN}),
    ("fig3b", made_up.pre_ln((-1.0,), (-4.0,)), {"pre-ln": NO}),
    ("fig1", made_up.entries((-6.0, -4.0), (0, 0)), {"entries": YES}),
    ("fig1", made_up.entries((-6.0, -4.0), (0, 0), power=3.0), {"entries": WHEN}),
    ("fig1", made_up.entries((-4.5, -4.0), (0, 0)), {"entries": NO}),
    ("fig1", made_up.entries((-6.0, -4.5), (0, 0)), {"entries": UNDECIDED}),
    (
        "fig4",
        made_up.entries((-6, -4), (-4, -4)),
        {"softmax-entries": YES, "softmax-query": YES, "softmax-indefinite": YES},
    ),
    ("fig4", made_up.entries((-6, -4), (-2, -1)), {"softmax-entries": NO, "softmax-query": NO}),
    ("fig4", made_up.entries((-4.1, -4), (-4, -4)), {"softmax-query": NO}),
    ("fig4", made_up.entries((-6, -4), (-4, -4), (0.3, 0.2, 0.0)), {"softmax-indefinite": WHEN}),
    ("fig4", made_up.entries((-6, -4), (-4, -4), (0.0, 0.0, 0.0)), {"softmax-indefinite": NO}),
    (
        "fig6",
        made_up.deep(),
        dict.fromkeys(("deep-same", "deep-lower", "deep-beyond", "deep-top", "deep-value-functional"), YES),
    ),
    ("fig6", made_up.deep(beyond=0.4, knee=0.2), {"deep-same": WHEN}),
    (
        "fig6",
        made_up.deep(below=1.0, beyond=1.0, higher=-1.0, smaller=8.0, hollow=True),
        dict.fromkeys(("deep-same", "deep-lower", "deep-beyond", "deep-top", "deep-value-functional"), NO),
    ),
    ("fig7", made_up.stacked(1, 0.5, 1), {"depth-linear": YES}),
    ("fig7", made_up.stacked(1, 0.5, 0.5), {"depth-linear": WHEN}),
    ("fig7", made_up.stacked(0.5, 0.5, 0.5), {"depth-linear": NO}),
    ("fig8", made_up.mlp(2), {"depth-mlp": YES}),
    ("fig8", made_up.mlp(2, 3), {"depth-mlp": WHEN}),
    ("fig8", made_up.mlp(3), {"depth-mlp": NO}),
    ("table1", made_up.linear((6, 3), (2, 1), (2, 1)), {"table-1": YES, "cnn": YES, "linear-blocks": YES}),
    ("table1", made_up.linear((5, 3), (2, 1), (2, 3), hollow=0.1), {"table-1": WHEN, "cnn": NO, "linear-blocks": WHEN}),
    ("table1", made_up.linear((5, 2), (3, 2), (2, 1), 5.0, 0.1), {"table-1": NO, "cnn": NO, "linear-blocks": NO}),
    ("layer", made_up.one_layer((3,), (1,), 3, 3), {"jacobians": YES, "outer-large": YES}),
    ("layer", made_up.one_layer((3, 1), (1,), 0.3, 2.5), {"jacobians": WHEN, "outer-large": WHEN}),
    ("layer", made_up.one_layer((2,), (1,), 0.3, 0.3), {"jacobians": NO, "outer-large": NO}),
    ("weights", made_up.scaled({}), {"weights": YES}),
    ("weights", made_up.scaled({"QQ": 0.5}), {"weights": WHEN}),
    ("weights", made_up.scaled({"all": 0.5}), {"weights": NO}),
    ("moments", made_up.spread(0), {"moments": YES, "similar": YES}),
    ("moments", made_up.spread(0, query=1), {"moments": WHEN}),
    ("moments", made_up.spread(0, beyond=-1), {"similar": WHEN}),
    ("moments", made_up.spread(-9), {"moments": NO, "similar": NO}),
    ("temperature", made_up.tempered((-2,), (-1,)), {"temperature": YES, "one-hot": YES}),
    ("temperature", made_up.tempered((1, -2), (1, -1)), {"temperature": WHEN}),
    ("temperature", made_up.tempered((-0.5,), (-0.5,), cold=0.5), {"temperature": NO, "one-hot": NO}),
    ("dispersion", made_up.shared(0.8, 0.8, 0.8, 0.8), {"dispersed": YES}),
    ("dispersion", made_up.shared(0.1, 0.2, 0.3, 0.8), {"dispersed": WHEN}),
    ("dispersion", made_up.shared(0.1, 0.1, 0.1, 0.1), {"dispersed": NO}),
    ("dispersion", made_up.shared(0.8, 0.8, 0.8, 0.8, rise=-0.1), {"dispersed": NO}),  # large tokens, not spread
    ("key-size", made_up.keys(0.999, 0.999), {"even-at-start": YES}),
    ("key-size", made_up.keys(0.8, 0.999), {"even-at-start": WHEN}),
    ("key-size", made_up.keys(0.8, 0.8), {"even-at-start": NO}),
    ("single-matrix", made_up.single(0, 0, 0), {"t-pairs": YES, "t-rank": YES, "single-matrix": YES}),
    ("single-matrix", made_up.single(1, 1, 1, narrow=True), {"t-pairs": WHEN, "t-rank": WHEN, "single-matrix": WHEN}),
    ("single-matrix", made_up.single(1, 1, 1), {"t-pairs": NO, "t-rank": NO, "single-matrix": NO}),
    ("heads", made_up.heads(3, 0.2), {"heads": YES, "low-rank-value": YES}),
    ("heads", made_up.heads(1, 0.2, hollow=1, low_only=True), {"heads": WHEN, "low-rank-value": WHEN}),
    ("heads", made_up.heads(1, 0.9, hollow=1), {"heads": NO, "low-rank-value": NO}),
    ("heads", made_up.heads(3, 0.2, between=0.1), {"heads": NO}),
    ("value-functional", made_up.value(0, 0, 0, 0), {"value-functional": YES}),
    ("value-functional", made_up.value(0, 0, 0.3, 0.9), {"value-functional": WHEN}),
    ("value-functional", made_up.value(0.1, 0.1, 0.3, 0.9), {"value-functional": NO}),
]


@pytest.mark.parametrize(("experiment", "result", "expected"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_verdicts_follow_the_data(experiment: str, result: Result, expected: dict[str, str]) -> None:
    found = judged(experiment, result)
    assert {claim: found[claim].verdict for claim in expected} == expected, [found[claim] for claim in expected]


def test_every_claim_of_the_paper_is_seen_to_hold_and_to_fail() -> None:
    seen: dict[str, set[str]] = {}
    for _, _, expected in CASES:
        for claim, verdict in expected.items():
            seen.setdefault(claim, set()).add(verdict)
    assert {claim for claim, verdicts in seen.items() if not {YES, NO} <= verdicts} == set()
    paper = {finding.claim for name in {case[0] for case in CASES} for finding in reported(name, first(name)).findings}
    assert paper == set(seen)


def first(experiment: str) -> Result:
    return next(result for name, result, _ in CASES if name == experiment)


def test_where_a_law_holds_is_told_from_the_curve() -> None:
    assert judged("fig3a", small)["growth-value"].regime == "σ ≤ 0.22"
    assert judged("fig3a", large)["growth-value"].regime == "σ ≥ 0.46"
    assert judged("fig6", made_up.deep(beyond=0.4, knee=0.2))["deep-same"].regime == "σ ≤ 0.1"
    early = judged("fig7", made_up.stacked(1, 0.5, 1))["depth-linear"].measured
    assert "σ^27.00 to σ^27.00 for σ ≤ 0.1" in early
    assert "earlier layers of 3: within 0.1 of 54 for σ ≥ 1" in early
    assert (
        "T-outer part dominates at t = 0.001"
        in judged("temperature", made_up.tempered((0, -2), (1, -1)))["temperature"].regime
    )


def test_regimes_name_what_lies_behind_and_how_large_the_embeddings_are() -> None:
    grown = judged("fig1", made_up.entries((-6.0, -4.0), (0, 0), power=3.0))["entries"]
    assert grown.regime == "σ = 0.14; σ = 0.2; σ = 0.28"
    below = judged("fig3b", made_up.pre_ln((-1.0,), (-1.2,), below=(6, 3)))["pre-ln"].regime
    assert "not where σ is below √ε = 0.0032: slopes are 5.00 (Q) and 1.80 (V), 3.20 ± 0.00 apart" in below
    zero = judged("value-functional", made_up.value(0, 0, 0.3, 0.9))["value-functional"]
    assert "GELU" not in zero.regime
    assert "with ‖H_f(V)‖ of σ^2.00" in zero.measured


@pytest.mark.parametrize(("left", "said"), [(0.0, "agrees"), (1e-20, "differs")])
def test_the_zero_of_the_value_block_can_fail(left: float, said: str) -> None:
    """What the row of Figure 3a compares is computed, by products with the functional part."""
    numbers = reported("value-functional", made_up.value(0, 0, 0.3, 0.9, wide=left)).numbers
    assert [each.outcome for each in compared(numbers)] == [said, said]


@pytest.mark.parametrize("claim", ["deep-beyond", "outer-large", "heads", "entries"])
def test_what_two_seeds_cannot_tell_stays_open(claim: str) -> None:
    """Seeds that differ by as much as what is asked for."""
    apart = {
        "deep-beyond": ("fig6", lambda c: made_up.deep(higher=0.1 + 2 * c["seed"])(c)),
        "outer-large": ("layer", lambda c: made_up.one_layer((3,), (1,), 1 + 9 * c["seed"], 1 + 9 * c["seed"])(c)),
        "heads": ("heads", lambda c: made_up.heads(1 + 9 * c["seed"], 0.9)(c)),
        "entries": ("fig1", lambda c: made_up.entries((-6.5 + c["seed"], -4.0), (0, 0))(c)),
    }
    experiment, result = apart[claim]
    finding = judged(experiment, result, seeds=2)[claim]
    assert finding.verdict == UNDECIDED or "cannot tell" in finding.measured
    assert "2 seeds" in finding.measured


@pytest.mark.parametrize(
    ("experiment", "result", "lowest"),
    [
        ("fig3a", right, {"sigma": 0.01}),
        ("fig6", made_up.deep(), {"sigma": 0.01}),
        ("fig7", made_up.stacked(1, 0.5, 1), {"sigma": 0.01}),
        ("layer", made_up.one_layer((3,), (1,), 3, 3), {"sigma": 0.01}),
        ("moments", made_up.spread(0), {"spread": 0.001}),
        ("temperature", made_up.tempered((-2,), (-1,)), {"temperature": 0.001}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_underflows_is_left_out_and_told(experiment: str, result: Result, lowest: dict[str, float]) -> None:
    def under(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: under(each) for key, each in value.items()}
        if isinstance(value, list):
            return [under(each) for each in value]
        return UNDERFLOW if value else value

    def cut(config: Mapping[str, Any]) -> dict[str, Any]:
        whole = result(config)
        if not lowest.items() <= config.items():
            return whole
        return {key: value if key in ("entropy", "residual") else under(value) for key, value in whole.items()}

    verdicts = {claim: finding.verdict for claim, finding in judged(experiment, cut).items()}
    assert verdicts == {claim: finding.verdict for claim, finding in judged(experiment, result).items()}
    assert any("too small" in note for note in reported(experiment, cut).notes)


def test_predictions_are_those_of_equation_5() -> None:
    for (letter, part), power in deep_findings.PREDICTED.items():
        assert growth.equation_5(part, letter) == power  # type: ignore[arg-type]
