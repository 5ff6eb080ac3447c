"""Verdicts on edges, advice, blocks and forecasts follow the data, whichever way they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from curvlens.papers.headlines import headline
from curvlens.papers.motion import block_order, forecast_departure
from made_up import Result
from test_first_paper_verdicts import NO, UNDECIDED, WHEN, YES, judged

SEEDS = 8
"""So many that a sign test decides."""


def wavy(config: Mapping[str, Any], value: float) -> float:
    """A little different in every seed, in no order."""
    return float(value * (1 + 0.003 * ((7 * config["seed"]) % 5)))


def steps(below: tuple[float, float, float], after: float, critical: float, late: float | None = None) -> Result:
    """What is left at 0.98 of the edge by rule; the loss after a step; the critical rate, another one later on."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        if config["rule"] == "one step":
            changed = late is not None and config["stage"] > 0
            rate = wavy(config, late if changed and late else critical)
            fell = 0.9 if changed else after
            return {"loss": 1.0, "after": [0.9, 0.9, wavy(config, fell)], "critical": rate, "model": rate}
        end = dict(zip(("gd", "momentum", "adam"), below, strict=True))[config["rule"]]
        return {"0.98": [1.0] + [wavy(config, end)] * 10, "1.02": [1.0] + [wavy(config, 50.0)] * 10}

    return result


def hovering(adam: float, gd: float, end: float = 1.0) -> Result:
    """Fractions of the edge that rise to a level, and at the end change by a factor."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        level = wavy(config, adam if config["rule"] == "adam" else gd)
        count = config["steps"] // config["every"]
        ratio = [level * min(1.0, 0.01 * 2**i) * (end if i > 0.85 * count else 1.0) for i in range(count)]
        return {"steps": list(range(1, count + 1)), "ratio": ratio, "loss": [1.0] * count}

    return result


def losses(adam: float, adagrad: float, momentum: float, clip: float, own: float) -> Result:
    """Losses with the best of the learning rates, over those of SGD."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        if config["rule"] == "observed":
            return {"condition": [wavy(config, 200.0), 100.0], "top": [wavy(config, 4.0), 2.0], "negative": -0.5}
        sizes = {"sgd": 1.0, "adam": adam, "adagrad": adagrad, "momentum": momentum, "clip": clip}
        best = sizes.get(config["rule"], own) * (1 + 0.004 * ((len(config["rule"]) * config["seed"]) % 7))
        return {"loss": [3 * best, 2 * best, best, 2 * best, float("inf")]}

    return result


def ordered(*sizes: float) -> Result:
    """Mean curvatures of the roles in the published order."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        found = {
            role: size * (1 + 0.004 * ((len(role) * config["seed"]) % 7))
            for role, size in zip(block_order.ROLES, sizes, strict=True)
        }
        return {"H": {role: -size for role, size in found.items()}, "G": found}

    return result


def spread(scales: float, shapes: float) -> Result:
    """Distances in the Transformer over those in the convolutional network."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        of = (scales, shapes) if config["network"] == "gpt" else (1.0, 1.0)
        moved = 1 + 0.004 * ((5 * config["seed"]) % 7 if config["network"] == "gpt" else config["seed"] % 3)
        return dict(zip(("scales", "shapes"), (0.2 * size * moved for size in of), strict=True))

    return result


def course(learning: int | None, fitted: int | None) -> Result:
    """When the forecasts depart, in both states, for all rules."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        departure = learning if config["state"] == "learning" else fitted
        found = {"departure": departure, "gap": [0.01 * (t + 1) for t in range(7)]}
        return {f"{rule} {part:g}": found for rule in forecast_departure.RULES for part in forecast_departure.FRACTIONS}

    return result


def tops(first: float, later: float, overlap: float = 0.9) -> Result:
    """The largest eigenvalue of the Gauss–Newton part over that of the Hessian, at the start and later; the overlap."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        size = wavy(config, later if config["steps"] else first)
        return {"H": 1.0, "G": size, "overlap": wavy(config, overlap), "functional": 0.3}

    return result


CASES: list[tuple[str, Result, dict[str, str]]] = [
    (
        "step-edge",
        steps((0.02, 0.1, 0.1), 0.9, 1.0),
        {"loss-falls": YES, "critical-rate": YES, "edge-steps": YES},
    ),
    (
        "step-edge",
        steps((0.02, 3.0, 0.1), 1.1, 2.0, 1.0),
        {"loss-falls": WHEN, "critical-rate": WHEN, "edge-steps": WHEN},
    ),
    (
        "step-edge",
        steps((2.0, 3.0, 2.0), 1.1, float("inf")),
        {"loss-falls": NO, "critical-rate": NO, "edge-steps": NO},
    ),
    ("adam-edge", hovering(0.9, 1.2), {"adam-edge": YES, "gd-edge": YES}),
    ("adam-edge", hovering(0.1, 4.0), {"adam-edge": NO, "gd-edge": NO}),
    ("adam-edge", hovering(0.9, 1.2, 2.5), {"adam-edge": NO, "gd-edge": NO}),  # it passes the edge and rises on
    (
        "recommendations",
        losses(0.5, 0.6, 0.7, 0.8, 0.9),
        dict.fromkeys(("advice-adaptive", "advice-momentum", "advice-layerwise"), YES),
    ),
    (
        "recommendations",
        losses(0.5, 1.6, 0.7, 1.8, 1.0),
        {"advice-adaptive": WHEN, "advice-momentum": WHEN, "advice-layerwise": UNDECIDED},
    ),
    (
        "recommendations",
        losses(1.5, 1.6, 1.7, 1.8, 1.9),
        dict.fromkeys(("advice-adaptive", "advice-momentum", "advice-layerwise"), NO),
    ),
    ("block-order", ordered(0.1, 1.0, 1.5, 2.0, 9.0), {"block-order": YES}),
    ("block-order", ordered(0.8, 1.0, 1.5, 2.0, 9.0), {"block-order": WHEN}),
    ("block-order", ordered(9.0, 4.0, 3.0, 2.0, 1.0), {"block-order": NO}),
    ("block-heterogeneity", spread(1.5, 1.2), {"block-heterogeneity": YES}),
    ("block-heterogeneity", spread(1.5, 0.8), {"block-heterogeneity": WHEN}),
    ("block-heterogeneity", spread(0.5, 0.8), {"block-heterogeneity": NO}),
    ("forecast-departure", course(None, None), {"quadratic-course": YES}),
    ("forecast-departure", course(3, None), {"quadratic-course": WHEN}),
    ("forecast-departure", course(3, 9), {"quadratic-course": NO}),
    ("ggn-top-training", tops(1.02, 0.98), {"ggn-top-training": YES}),
    ("ggn-top-training", tops(2.0, 0.98), {"ggn-top-training": WHEN}),
    ("ggn-top-training", tops(2.0, 0.7), {"ggn-top-training": NO}),
    ("ggn-top-training", tops(1.02, 0.98, 0.3), {"ggn-top-training": NO}),
]


NO_NUMBER = {"critical-rate", "ggn-top-training", "quadratic-course"}
"""Claims whose number is of full settings, or the word 'never'."""


@pytest.mark.parametrize(("experiment", "result", "expected"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_verdicts_follow_the_data(experiment: str, result: Result, expected: dict[str, str]) -> None:
    found = judged(experiment, result, seeds=SEEDS)
    assert {claim: finding.verdict for claim, finding in found.items()} == expected, found
    for finding in found.values():
        assert headline(finding)[0] or finding.claim in NO_NUMBER, finding


def test_every_claim_is_seen_to_hold_and_to_fail() -> None:
    seen: dict[str, set[str]] = {}
    for _, _, expected in CASES:
        for claim, verdict in expected.items():
            seen.setdefault(claim, set()).add(verdict)
    assert {claim for claim, verdicts in seen.items() if not {YES, NO} <= verdicts} == set()


def test_a_best_rate_at_the_end_of_those_tried_decides_nothing() -> None:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        found = losses(0.5, 0.6, 0.7, 0.8, 0.9)(config)
        return {"loss": sorted(found["loss"])} if "loss" in found else found

    found = judged("recommendations", result, seeds=SEEDS)
    assert {finding.verdict for finding in found.values()} == {UNDECIDED}
    assert all("at the end of those tried" in finding.measured for finding in found.values())


@pytest.mark.parametrize("experiment", sorted({case[0] for case in CASES}))
def test_one_seed_confirms_nothing(experiment: str) -> None:
    result = next(result for name, result, expected in CASES if name == experiment and YES in expected.values())
    assert {finding.verdict for finding in judged(experiment, result, seeds=1).values()} == {UNDECIDED}
