"""Findings of the slides and of the full block, and comparisons with references: every outcome from made-up data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from curvlens.papers import CLAIMS, Effort, Experiment, Finding, Number, named
from curvlens.papers.experiment import at_width
from curvlens.papers.full_block.training import GROUPS, ROLES, _phases
from curvlens.papers.page_markdown import table_row
from curvlens.papers.reference import Comparison, Reference, compared, differences, explanations, references
from curvlens.papers.shown import reference_cells
from curvlens.papers.slides.gauss_newton import ATTENTION, MLPS
from curvlens.papers.sweeps import Sweep, mean
from curvlens.papers.verdicts import judged_parts
from curvlens.study import Record

Make = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def jitter(config: Mapping[str, Any], size: float = 0.05) -> float:
    """A factor near 1 that depends on the configuration."""
    return math.exp(size * math.sin(zlib.crc32(str(sorted(config.items())).encode())))


def made(experiment: Experiment, make: Make, effort: Effort) -> list[Record]:
    return [Record(experiment.stored_as, 1, dict(c), dict(make(c))) for c in experiment.points(effort)]


def found(name: str, claim: str, make: Make, seeds: int = 6, *, quick: bool = True) -> Finding:
    """The finding on a claim, from a point's numbers."""
    experiment = named(name)
    report = experiment.report(made(experiment, make, Effort(quick=quick, seeds=seeds)))
    finding = {each.claim: each for each in report.findings}[claim]
    assert claim in {each.name for each in CLAIMS}
    assert bool(finding.regime) == (finding.verdict == "holds when")
    assert "nan" not in finding.measured
    return finding


def verdict(name: str, claim: str, make: Make, seeds: int = 6) -> str:
    return found(name, claim, make, seeds).verdict


# The slides


def scalar(apart: float = 1e-14, outside: float = 10.0, power: float = 2.0, least: float = 0.9) -> Make:
    return lambda c: {
        "bulk": 0.8,
        "outliers": [-1.0, least, outside],
        "ggn": [1.0],
        "condition": 10 * c["size"] ** power * (1 + 0.1 * c["seed"]),
        "apart": apart,
        "multiplicity": c["d_k"] - 1,
    }


def test_the_spectrum_of_scalar_attention() -> None:
    assert verdict("scalar", "scalar-bulk", scalar()) == "holds"
    assert verdict("scalar", "scalar-bulk", scalar(apart=1e-3, least=0.1)) == "does not hold"
    assert found("scalar", "scalar-bulk", scalar(outside=2.0, least=0.1)).regime == "the pairs"
    inside = found("scalar", "scalar-bulk", scalar(least=0.1))  # of three others not all are outliers
    assert (inside.verdict, "three outliers" in inside.regime) == ("holds when", False)
    some = found("scalar", "scalar-bulk", lambda c: {**scalar()(c), "apart": 1e-3 if c["d_k"] > 2 else 1e-14})
    assert some.verdict == "holds when"
    assert "d_K = 2:" in some.regime
    assert "d_K = 8" not in some.regime


def test_the_condition_number() -> None:
    assert verdict("scalar", "scalar-condition", scalar()) == "holds"
    assert verdict("scalar", "scalar-condition", scalar(power=-2.0)) == "holds"
    assert verdict("scalar", "scalar-condition", scalar(power=0.1)) == "does not hold"
    assert verdict("scalar", "scalar-condition", scalar(), seeds=1) == "undecided"


@pytest.mark.parametrize(
    ("bulk", "top", "said"),
    [(-0.2, 0.2, "holds"), (0.2, -0.2, "does not hold"), (-0.2, -0.2, "holds when"), (0.0, 0.0, "undecided")],
)
def test_sinks_in_scalar_attention(bulk: float, top: float, said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, float]:
        # seeds on both sides of the trend, which is all there is without one
        wave = math.exp(0.01 * c["sink"] * (-1) ** c["seed"])
        return {"bulk": math.exp(bulk * c["sink"]) * wave, "top": math.exp(top * c["sink"]) * wave}

    finding = found("sink-scalar", "sink-scalar", make)
    assert finding.verdict == said
    if said == "holds when":
        assert "the bulk shrinks" in finding.regime
        assert "outliers" not in finding.regime
    if said == "undecided":
        assert "6 seeds cannot tell from 1" in finding.measured


@pytest.mark.parametrize(("bulk", "top", "said"), [(20, 9, "holds"), (2, 1, "does not hold"), (0.01, 2, "holds when")])
def test_outlier_activations(bulk: float, top: float, said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, float]:
        large = c["first"] > 1
        return {"bulk": (bulk if large else 1) * jitter(c), "top": (top if large else 1) * jitter(c)}

    assert verdict("sink-scalar", "outlier-activations", make) == said


@pytest.mark.parametrize(
    ("stretch", "said"),
    [((1, 2, 3, 4), "holds"), ((1, 0.5, 0.4, 0.3), "does not hold"), ((1, 1.5, 1.5, 1), "undecided")],
)
def test_sinks_in_a_gpt(stretch: Sequence[float], said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, float]:
        factor = stretch[int(c["sink"]) // 2] * jitter(c)
        return {"top": 50 * factor, "bottom": 1.0, "middle": 0.01, "norm": 1.0, "loss": 1.0}

    assert verdict("sink-gpt", "sink-gpt", make, seeds=5) == said
    assert verdict("sink-gpt", "sink-gpt", make, seeds=1) == "undecided"


def gauss_newton(worse: Iterable[tuple[str, float]]) -> Make:
    """Networks and residuals at which the Gauss–Newton matrix is far off; others are as the MLPs and below."""
    far = set(worse)

    def make(c: Mapping[str, Any]) -> dict[str, float]:
        off = 0.1 if c["network"] in MLPS else 0.5 if (c["network"], c["residual"]) in far else 0.01
        return {"hessian": 1.0, "ggn": 1.0 - off * (1 + 0.01 * c["seed"])}

    return make


def test_the_gauss_newton_matrix_at_the_top() -> None:
    every = {(network, residual) for network in ATTENTION for residual in (0.1, 1.0, 10.0)}
    assert verdict("ggn-top", "ggn-top", gauss_newton(every)) == "holds"
    assert verdict("ggn-top", "ggn-top", gauss_newton(())) == "does not hold"
    assert verdict("ggn-top", "ggn-top", gauss_newton(every), seeds=2) == "undecided"
    some = found("ggn-top", "ggn-top", gauss_newton({("scalar", 1.0)}))
    assert some.verdict == "holds when"
    assert some.regime == "scalar attention against every MLP at a residual of 1"


@pytest.mark.parametrize(
    ("parts", "said", "told"),
    [
        ({"a": True, "b": True}, "holds", ""),
        ({"a": True, "b": None, "c": False}, "holds when", " Undecided: b. Refuted: c."),
        ({"a": False, "b": False}, "does not hold", ""),
        ({"a": False, "b": None}, "undecided", " Undecided: b. Refuted: a."),
        ({"a": None, "b": None}, "undecided", ""),
        ({}, "undecided", ""),
    ],
)
def test_a_claim_fails_only_if_no_part_may_hold(parts: Mapping[str, bool | None], said: str, told: str) -> None:
    finding = judged_parts("heads", "Measured.", parts)
    assert (finding.verdict, finding.measured) == (said, f"Measured.{told}")


# The full block


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (lambda s: s / (s + 0.3) ** 2, "holds"),
        (lambda s: s / (s * s + 1e-5) ** 1.5, "holds when"),
        (lambda s: s**-2.0, "does not hold"),
    ],
)
def test_whether_layer_norm_is_bounded(curve: Callable[[float], float], said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, float]:
        return {"with": curve(c["spread"]) * jitter(c), "without": c["spread"] ** -2}

    finding = found("layernorm", "norm-bounded", make)
    assert finding.verdict == said
    if said == "holds when":
        assert finding.regime == "spreads of at least 0.32"


@pytest.mark.parametrize(
    ("relu", "between", "gelu", "said"),
    [
        (0.0, 0.01, 0.9, "holds"),
        (0.0, 0.5, 0.9, "holds when"),
        (0.3, 0.01, 0.9, "does not hold"),
        (0.0, 0.01, 0.0, "does not hold"),
    ],
)
def test_whether_relu_is_simple(relu: float, between: float, gelu: float, said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, list[float]]:
        up = relu if c["activation"] == "relu" else gelu
        return {"up": [1.0, up], "down": [1.0, 0.0], "between": [1.0, between * jitter(c)]}

    assert verdict("feedforward", "relu-simple", make) == said


@pytest.mark.parametrize(
    ("attention", "others", "said"),
    [((2, 2), 2, "holds"), ((0.9, 0.9), 2, "does not hold"), ((2, 0.9), 2, "holds when")],
)
def test_the_bound_is_judged_by_attention_alone(attention: Sequence[float], others: float, said: str) -> None:
    def make(c: Mapping[str, Any]) -> dict[str, float]:
        value = attention[c["sigma"] > 0.5] if c["of"] == "attention" else others
        return {"prior": 10 * value, "data": value}

    finding = found("bounds", "bound", make)
    assert finding.verdict == said
    if said == "holds when":
        assert finding.regime == "σ = 0.01, σ = 0.1"
    assert "our text of the source lacks them" in finding.measured


def test_a_bound_of_blocks_that_fails_is_told_beside() -> None:
    finding = found("bounds", "bound", lambda c: dict.fromkeys(("prior", "data"), 2 if c["of"] == "attention" else 0.5))
    assert finding.verdict == "holds"
    assert "120 of 120 from the data" in finding.measured


def test_a_bound_that_left_float64_is_told_and_left_out() -> None:
    experiment = named("bounds")
    records = made(
        experiment,
        lambda c: {"prior": "inf" if c["of"] == "block post" and c["sigma"] < 0.1 else 5.0, "data": 2.0},
        Effort(quick=True, seeds=3),
    )
    report = experiment.report(records)
    assert report.findings[0].verdict == "holds"
    assert "nan" not in report.findings[0].measured
    assert any("too large" in note for note in report.notes)
    first, second = report.charts[0].panels
    assert (first.legend, second.legend) == (True, False)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pre", "post", "none", "said"),
    [
        (1.1, 3.0, 4.0, "holds"),
        (4.0, 3.0, 3.5, "holds when"),
        (2.0, 3.0, 1.5, "holds when"),
        (0.4, 0.5, 0.6, "does not hold"),
    ],
)
def test_growth_with_depth(pre: float, post: float, none: float, said: str) -> None:
    factor = {"pre": pre, "post": post, "none": none}

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        size = factor[c["norm"]] ** ((c["layers"] - 1) / 2) * jitter(c, 0.02)
        return {"whole": [size] * 3, "top": size, "layers": [[size] * 3] * c["layers"]}

    finding = found("depth", "depth-growth", make, 5)
    assert finding.verdict == said
    assert ("slower growth with Pre-LN than with Post-LN" in finding.regime) == (said == "holds when" and pre < post)
    assert ("the remedy does not hold" in finding.regime) == (said == "holds when" and pre > post)
    assert verdict("depth", "depth-growth", make, seeds=1) == "undecided"


def training(norm: Callable[[Mapping[str, Any]], float], own: float = 1.0, zero: float = 0.0) -> Make:
    size = len(GROUPS)
    blocks = [[own if i == j else 1.0 for j in range(size)] for i in range(size)]

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "norm": norm(c),
            "top": 1.0,
            "roles": {role: [1.0, 1.0, 1.0] for role in ROLES},
            "groups": blocks,
            "spectral": [
                [value * jitter(c) if i == j else value for j, value in enumerate(row)] for i, row in enumerate(blocks)
            ],
            "zero": int(1000 * zero),
            "zero beside key biases": int(1000 * zero),
            "pairs": 1000,
        }

    return make


@pytest.mark.parametrize(("own", "said"), [(20.0, "holds"), (1.0, "does not hold")])
def test_whether_the_diagonal_dominates(own: float, said: str) -> None:
    assert verdict("training", "diagonal-network", training(lambda c: 1.0, own=own)) == said


def test_the_groups_whose_diagonal_dominates_are_named() -> None:
    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(training(lambda c: 1.0)(c))
        result["spectral"] = [[20.0, *[1.0] * 5], *[[1.0] * 6] * 5]
        return result

    finding = found("training", "diagonal-network", make)
    assert (finding.verdict, finding.regime) == ("holds when", "the row of layer 1")


def within(own: Callable[[Mapping[str, Any]], float]) -> Make:
    """Blocks of attention, feed-forward part and norms, of a given size on the diagonal and of 1 beside it."""

    def make(c: Mapping[str, Any]) -> dict[str, Any]:
        size = 2 if c["norm"] == "none" else 3
        block = [[own(c) * jitter(c) if i == j else 1.0 for j in range(size)] for i in range(size)]
        return {"spectral": [block] * 2, "frobenius": [block] * 2}

    return make


def test_whether_the_diagonal_dominates_inside_a_block() -> None:
    assert verdict("within-block", "diagonal", within(lambda c: 5.0)) == "holds"
    assert verdict("within-block", "diagonal", within(lambda c: 0.5)) == "does not hold"
    some = found("within-block", "diagonal", within(lambda c: 5.0 if (c["norm"], c["steps"]) == ("none", 0) else 0.5))
    rows = [f"the row of {group}, no norm, at initialisation" for group in ("attention", "feed-forward")]
    assert (some.verdict, some.regime) == ("holds when", "; ".join(rows))
    assert "attention with feed-forward 0.2" in some.measured


def test_zero_blocks() -> None:
    assert verdict("training", "zero-blocks", training(lambda c: 1.0, zero=0.5)) == "holds"
    assert verdict("training", "zero-blocks", training(lambda c: 1.0)) == "does not hold"
    some = found("training", "zero-blocks", lambda c: training(lambda c: 1.0, zero=0.5 * (c["steps"] == 0))(c))
    assert (some.verdict, some.regime) == ("holds when", "after 0 steps")


def _settled(c: Mapping[str, Any]) -> float:
    return math.exp(3 * (1 - math.exp(-c["steps"] / 20)) + 1e-3 * math.sin(c["steps"] + c["seed"]))


def _fading(c: Mapping[str, Any]) -> float:
    """Slower than a random walk, but not by its net changes."""
    return math.exp(0.5 * math.log1p(c["steps"] / 60) * (1 + 0.01 * math.sin(c["steps"] + c["seed"])))


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (_settled, "holds"),
        (_fading, "holds when"),
        (lambda c: math.exp(0.01 * c["steps"] * (1 + 0.1 * c["seed"])), "does not hold"),
    ],
)
def test_phases_of_training(norm: Callable[[Mapping[str, Any]], float], said: str) -> None:
    assert verdict("training", "training-phases", training(norm), seeds=5) == said


@pytest.mark.parametrize("quick", [True, False])
def test_a_random_walk_has_no_phases(quick: bool) -> None:
    steps = sorted({c["steps"] for c in named("training").points(Effort(quick=quick))})
    noise = torch.randn(150, 5, max(steps), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    walks = torch.cat([torch.zeros(150, 5, 1), 0.05 * noise.cumsum(2)], 2)[..., steps]
    found = [_phases(Sweep(tuple(steps), walk.exp())).verdict for walk in walks]
    assert found.count("holds") <= 2
    assert 0.9 * len(found) < found.count("undecided") < len(found)


# References


@pytest.mark.parametrize(
    ("value", "error", "width", "said"),
    [
        (2.1, 0.1, 128, "agrees"),
        (2.1166, 0.06, 128, "agrees"),  # the root of 0.1² + 0.06² is 0.11662
        (2.1167, 0.06, 128, "differs"),  # though within their sum
        (2.1, 0.4, 128, "too few seeds to tell"),
        (2.1, math.inf, 128, "too few seeds to tell"),
        (4.0, 0.4, 128, "differs"),
        (4.0, 0.1, 32, "other width, not comparable"),
        (2.0, 0.1, None, "other width, not comparable"),
    ],
)
def test_a_number_beside_its_reference(value: float, error: float, width: int | None, said: str) -> None:
    comparison = Comparison(Reference("a", "what|ever", 2.0, 0.1, "own", 128), Number("a", value, error, None, width))
    assert comparison.outcome == said
    row = table_row(reference_cells(comparison))
    assert said in row
    assert r"what\|ever" in row
    told = width == 128 and math.isfinite(error)
    assert row.split(" | ")[4] == (f"{comparison.apart:.2f}" if told else "")


def test_a_difference_in_parts_of_its_error() -> None:
    comparison = Comparison(Reference("a", "", 1.85, 0.08, "own"), Number("a", 1.693, 0.083, (1.129, 10.0)))
    assert comparison.apart == pytest.approx(0.157 / math.hypot(0.08, 0.083))
    assert "1.693 ± 0.083 (σ from 1.13 to 10)" in table_row(reference_cells(comparison))
    exact = Comparison(Reference("a", "", 0.0, 0.0, "own"), Number("a", 0.0, 0.0))
    assert (exact.outcome, exact.apart) == ("agrees", 0.0)
    assert Comparison(exact.reference, Number("a", 1e-30, 0.0)).outcome == "differs"


def test_a_standard_error_is_half_of_a_95_percent_interval_after_1_96() -> None:
    plain, standard = (Reference("a", "", 0.07, 0.03, "own", None, flag) for flag in (False, True))
    number = Number("a", 0.0, 0.02)
    assert Comparison(plain, number).apart == pytest.approx(0.07 / math.hypot(0.03, 0.02))
    assert Comparison(standard, number).apart == pytest.approx(0.07 / math.hypot(1.959964 * 0.03, 0.02))
    assert "0.070 ± 0.059" in table_row(reference_cells(Comparison(standard, number)))
    assert Comparison(standard, Number("a", 0.07, 0.17)).outcome == "agrees"
    assert Comparison(standard, Number("a", 0.07, 0.18)).outcome == "too few seeds to tell"


def test_how_often_chance_makes_a_difference() -> None:
    """Of two normal samples 4.55 % are two standard errors apart, or farther."""
    far = Comparison(Reference("a", "the gap", 0.0, 0.6, "own"), Number("a", 2 / 1.959964, 0.8))
    near = Comparison(Reference("b", "", 0.0, 0.6, "own"), Number("b", 0.1, 0.8))
    assert far.chance == pytest.approx(0.0455, abs=1e-4)
    assert differences([far, near]) == [
        "the gap: if both ± are sampling errors, two samples are this far apart by chance in 4.6 % of all cases."
    ]


@pytest.mark.parametrize(
    ("value", "networks", "said"),
    [
        (0.0, 40, "within the reference's sampling error"),
        (0.0, None, "differs"),  # a sample of unknown size has only its own ±
        (0.0, 400, "differs"),
        (-0.1, 40, "differs"),
        (0.05, 40, "agrees"),
    ],
)
def test_a_small_sample_of_the_reference(value: float, networks: int | None, said: str) -> None:
    """A mean over n networks that scatter by s has ± t s/√n, whatever ± was printed for it."""
    ours = Number("a", value, 0.022, None, None, 0.22)
    comparison = Comparison(Reference("a", "", 0.07, 0.03, "own", None, True, networks), ours)
    assert comparison.outcome == said
    if networks == 40:
        assert comparison.sampling == pytest.approx(2.0227 * 0.22 / math.sqrt(40), rel=1e-4)
    assert len(explanations([comparison])) == (said == "within the reference's sampling error")


def test_a_mean_knows_how_its_repeats_scatter() -> None:
    assert mean("", [1.0, 2.0, 3.0]).spread == 1.0
    assert mean("", [1.0]).spread is None


def test_one_repeat_has_no_interval() -> None:
    assert math.isinf(mean("", [1.0]).error)
    line = Sweep((1.0, 2.0, 3.0), torch.tensor([[1.0, 4.0, 9.0]], dtype=torch.float64)).slope("a", (1.0, 3.0))
    assert math.isinf(line.error)
    assert line.window == (1.0, 3.0)


def test_the_references_of_the_papers() -> None:
    assert {source.source for source in references()[0]} == {"independent", "published"}
    published = {each.name for each in references()[0] if each.source == "published"}
    assert {"fig3a Q total below 1, published networks", "fig6 Q outer small", "fig8 slope"} <= published
    wide = at_width([Record("fig3a", 1, {"width": 32}, {})], [Number("fig3a Q total large", 4.18, 0.01)])
    assert [each.outcome for each in compared(wide)] == ["other width, not comparable"]
