"""Verdicts on tying, the bulk, values of low rank, step sizes and couplings follow the data, whichever way they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from curvlens.papers import Effort, named
from curvlens.papers.first_paper import growth, tying
from curvlens.papers.full_block import layer_coupling
from curvlens.papers.sizes import named_marks
from curvlens.study import Record
from made_up import Result, law, seeded
from test_first_paper_verdicts import NO, UNDECIDED, WHEN, YES, judged, reported


def tied(gain: float, positions: tuple[float, ...]) -> Result:
    """Blocks with powers that tying changes by so much, and with factors of the powers with fixed positions."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        def size(block: str, part: str) -> float:
            power = tying.POWERS[block, part]
            powers = (power + gain,) if config["variant"] == "tied" else tuple(power * each for each in positions)
            return seeded(config, law(config["sigma"], *powers))

        q = [size("Q", part) for part in ("outer", "functional", "total")]
        v = size("V", "total")
        return {"norms": {"Q": q, "V": [v, 0.0, v]}}

    return result


def bulk(small: float, large: float = 0.0) -> Result:
    """Shares below σ = 1 and from there on, of a small spread."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        share = (small if config["sigma"] < 1 else large or small) + 0.01 * (config["seed"] % 2)
        return {"bulk": share, "half": share, "outliers": 0.1, "inside": 0.9, "rank": 0.5}

    return result


def factors(mixed: tuple[float, ...], outer: float) -> Result:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = dict.fromkeys(("OO", "UU", "OU"), seeded(config, config["size"] ** outer))
        return {"outer": sizes, "OU": seeded(config, law(config["size"], *mixed))}

    return result


def rates(one: float, matrix: float, between: float) -> Result:
    """Conditions with one rate for all and one a matrix, those of one a parameter being 1."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"one": one, "matrix": matrix, "head": matrix, "parameter": 1.0}
        names = [f"{layer}{role}" for layer in range(2) for role in ("q", "k", "v", "o", "up", "down")]
        return {
            "condition": {rate: seeded(config, size) for rate, size in sizes.items()},
            "blocks": {rate: [seeded(config, sizes[rate])] * 12 for rate in ("matrix", "head", "parameter")},
            "top": {name: seeded(config, 1.0 + i) for i, name in enumerate(names)},
            "heads": [seeded(config, 2.0)] * 4,
            "between": between + 0.01 * (config["seed"] % 2),
        }

    return result


def tokens(softmax: float, held: float, linear: float, uniform: float, uneven: float = 9.0) -> Result:
    sizes = {"softmax": softmax, "held": held, "linear": linear, "uniform": uniform}

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        kind = config["kind"]
        apart = 1.0 if kind == "uniform" else seeded(config, uneven)
        # of its own for every kind: pairs of one seed would agree to the last digit
        size = seeded(config, sizes[kind]) * (1 + 0.001 * config["seed"] * len(kind))
        return {"beside": 1.0 + 0.01 * config["seed"], "own": 1.0, "coupling": size, "uneven": apart}

    return result


def coupled(with_norms: float, share: float) -> Result:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        size = 1.0 if config["norm"] == "none" else with_norms
        norms = 0.0 if config["norm"] == "none" else share + 0.01 * (config["seed"] % 2)
        coupling = [seeded(config, size) * (1 + 0.001 * config["seed"] * len(config["norm"]))] * 3
        return {"own": [1.0] * 3, "coupling": coupling, "shares": {"GGN": 0.5, "norms": norms, "others": 0.5 - norms}}

    return result


CASES: list[tuple[str, Result, dict[str, str]]] = [
    ("tying", tied(0, (1.0,)), {"growth-tied": YES, "growth-positions": YES}),
    ("tying", tied(1, (1.0, 0.5)), {"growth-tied": NO, "growth-positions": WHEN}),
    ("tying", tied(-1, (0.0,)), {"growth-tied": NO, "growth-positions": NO}),
    ("bulk", bulk(0.9), {"t-bulk": YES}),
    ("bulk", bulk(0.9, 0.2), {"t-bulk": WHEN}),
    ("bulk", bulk(0.3), {"t-bulk": NO}),
    ("value-factors", factors((2.0,), 2.0), {"low-rank-moment": YES}),
    ("value-factors", factors((1.0, 2.0), 2.0), {"low-rank-moment": WHEN}),
    ("value-factors", factors((1.0,), 1.0), {"low-rank-moment": NO}),
    ("step-sizes", rates(9.0, 1.1, 0.8), {"one-rate": YES}),
    ("step-sizes", rates(9.0, 5.0, 0.2), {"one-rate": WHEN}),
    ("step-sizes", rates(4.0, 5.0, 0.2), {"one-rate": NO}),
    ("tokens", tokens(0.9, 0.5, 0.5, 0.5), {"softmax-couples": YES}),
    ("tokens", tokens(0.5, 0.9, 0.1, 1.0), {"softmax-couples": WHEN}),
    ("tokens", tokens(0.1, 0.5, 0.5, 0.5, uneven=1.0), {"softmax-couples": NO}),
    ("layer-coupling", coupled(3.0, 0.9), {"norm-couples": YES}),
    ("layer-coupling", coupled(3.0, 0.1), {"norm-couples": WHEN}),
    ("layer-coupling", coupled(0.3, 0.1), {"norm-couples": NO}),
]


@pytest.mark.parametrize(("experiment", "result", "expected"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_verdicts_follow_the_data(experiment: str, result: Result, expected: dict[str, str]) -> None:
    found = judged(experiment, result)
    assert {claim: finding.verdict for claim, finding in found.items()} == expected, found


@pytest.mark.parametrize("experiment", ["bulk", "step-sizes", "tokens", "layer-coupling"])
def test_one_seed_decides_nothing(experiment: str) -> None:
    result = next(result for name, result, expected in CASES if name == experiment and NO in expected.values())
    assert {finding.verdict for finding in judged(experiment, result, seeds=1).values()} <= {UNDECIDED, WHEN}


def test_where_the_regimes_are() -> None:
    assert judged("tying", tied(0, (1.0, 0.5)))["growth-positions"].regime.startswith("σ ≤ ")
    said = judged("value-factors", factors((1.0, 2.0), 2.0))["low-rank-moment"].regime
    assert said.startswith("H_f(O,U) in M1 for factors s ≥ ")
    assert "; H_o in M1; " in said
    both = judged("layer-coupling", coupled(0.3, 0.9))["norm-couples"].regime
    assert all(layer_coupling.NORMS[norm] in both for norm in ("pre", "post"))
    assert "more coupling" not in both


def test_what_tying_adds_is_told() -> None:
    """Two powers in H_o and one in H_f, where the measured curves have them."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        powers = {each: tying.POWERS[each] + tying.GAINED[each] for each in tying.CURVES}
        size = {each: seeded(config, config["sigma"] ** power) for each, power in powers.items()}
        q = [size["Q", part] for part in ("outer", "functional", "total")]
        return {"norms": {"Q": q, "V": [size["V", "total"], 0.0, size["V", "total"]]}}

    found = judged("tying", result)["growth-tied"]
    low, high = growth.WHOLE
    assert found.verdict == NO
    assert f"within 0.1 of those for σ from {low:g} to {high:g}" in found.measured


def test_temperatures_between_the_ends_are_told() -> None:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        t = config["temperature"]
        norms = {block: [1.0, 1.0] for block in ("QQ", "KK", "VV", "QK", "VQ", "VK")}
        return {"norms": norms, "t": [seeded(config, 3 / t**2), 2 / t], "entropy": min(1.0, t)}

    text = next(f for f in reported("temperature", result).findings if f.claim == "temperature").measured
    assert "at t = 0.01; 1" in text
    assert "at t = 1; T-outer" in text
    assert "t^-2.00 and t^-1.00 from 0.01 to 0.1; t^-2.00 and t^-1.00 from 0.1 to 1." in text


def test_the_cosine_of_the_query_parts_and_slopes_beyond_3_are_told() -> None:
    """Parts at an angle of 60°, and a block that grows with σ³ beyond the knee."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        size = law(config["sigma"], 5.0, 3.0)
        blocks = {key: [size, size, size * 3**0.5] for key in (*growth.DIAGONAL, *growth.PAIRS)}
        return {"norms": blocks | {"V": [size, 0.0, size]}}

    of = named("fig3a")
    records = [Record(of.name, of.revision, c, named_marks(result(c))) for c in of.points(Effort(seeds=2))]
    text = next(f for f in of.report(records).findings if f.claim == "growth-query").measured
    assert "cosine between H_o and H_f: 0.500 ± 0.000 (σ = 0.01), 0.500 ± 0.000 (σ = 1)" in text
    assert "σ^3.00 ± 0.00 for σ from 3.4 to 10" in text
