"""Laws fitted to tables: planted ones are found, intervals cover them, and a wrong formula would be seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from curvlens import CurvlensError
from curvlens.dynamics import curvature_gain, fits, loss_law, power_law

LAW = {"E": 0.8, "A": 30.0, "alpha": 0.6, "B": 12.0, "beta": 0.45}
SIZES, SAMPLES = (250, 560, 1200, 2700), (16, 64, 256, 1024)
Rows = list[dict[str, Any]]


def planted(noise: float = 0.0, seed: int = 0, seeds: int = 2, **more: float) -> Rows:
    """Losses of the law, with log-normal noise; ``hidden`` multiplies the loss by the power of a quantity q."""
    draws = np.random.default_rng(seed)
    rows = []
    for N in SIZES:
        for D in SAMPLES:
            for s in range(seeds):
                law = LAW["E"] + LAW["A"] / N ** LAW["alpha"] + LAW["B"] / D ** LAW["beta"]
                q = math.exp(draws.standard_normal())
                loss = law * q ** more.get("hidden", 0.0) * math.exp(noise * draws.standard_normal())
                rows.append({"parameters": N, "samples": D, "seed": s, "test_loss": loss, "q": q, "train_loss": loss})
    return rows


# Power laws


def powers(seed: int, seeds: int, exponent: float = -0.5) -> Rows:
    """Each seed has its own prefactor and exponent about the planted ones, and noise."""
    draws = np.random.default_rng(seed)
    rows = []
    for s in range(seeds):
        own = exponent + 0.05 * draws.standard_normal()
        level = math.log(3.0) + 0.2 * draws.standard_normal()
        for x in (16, 64, 256, 1024):
            y = math.exp(level + own * math.log(x) + 0.1 * draws.standard_normal())
            rows.append({"samples": x, "seed": s, "norm": y})
    return rows


def test_a_power_law_is_the_regression_of_numpy() -> None:
    rows = powers(0, 3)
    found = power_law(rows, "norm", "samples")
    each = []
    for seed in range(3):
        own = [row for row in rows if row["seed"] == seed]
        x, y = (np.log([row[name] for row in own]) for name in ("samples", "norm"))
        each.append(np.polyfit(x, y, 1))
    slopes, levels = np.array(each).T
    assert found.exponents.tolist() == pytest.approx(slopes.tolist(), rel=1e-12)
    assert found.exponent == pytest.approx(slopes.mean(), rel=1e-12)
    assert found.prefactor == pytest.approx(math.exp(levels.mean()), rel=1e-12)
    half = 4.302652729696 * slopes.std(ddof=1) / 3**0.5  # Student's t for two degrees of freedom
    assert found.interval == pytest.approx((found.exponent - half, found.exponent + half), rel=1e-9)
    assert found(100) == pytest.approx(found.prefactor * 100**found.exponent, rel=1e-12)
    assert "norm = " in str(found)
    assert found.y.shape == (3, 4)
    assert found.y[1].tolist() == [row["norm"] for row in rows if row["seed"] == 1]
    lines = levels[:, None] + np.outer(slopes, np.log([16, 64, 256, 1024]))
    around = 4.302652729696 * lines.std(0, ddof=1) / 3**0.5
    assert found.high.log().tolist() == pytest.approx((lines.mean(0) + around).tolist(), rel=1e-9)
    assert found.low.log().tolist() == pytest.approx((lines.mean(0) - around).tolist(), rel=1e-9)


def test_one_seed_has_the_interval_of_the_regression() -> None:
    """Against scipy's linregress, slope and intercept."""
    from scipy import stats

    rows = powers(1, 1)
    found = power_law(rows, "norm", "samples")
    x, y = (np.log([row[name] for row in rows]) for name in ("samples", "norm"))
    truth, t = stats.linregress(x, y), stats.t.ppf(0.975, 2)
    assert found.interval[1] - found.exponent == pytest.approx(t * truth.stderr, rel=1e-6)
    assert math.log(found.prefactor_interval[1] / found.prefactor) == pytest.approx(
        t * truth.intercept_stderr, rel=1e-6
    )
    residual = np.array(y) - truth.intercept - truth.slope * np.array(x)
    centred = np.array(x) - np.mean(x)
    half = t * np.sqrt(residual @ residual / 2 * (1 / 4 + centred**2 / (centred @ centred)))
    assert (found.high / found.low).log().tolist() == pytest.approx((2 * half).tolist(), rel=1e-6)


def coverage(seeds: int, repeats: int = 300) -> float:
    """How often the interval has the planted exponent, and that of the prefactor the planted prefactor: the rarer."""
    hits = np.zeros(2)
    for repeat in range(repeats):
        found = power_law(powers(repeat, seeds), "norm", "samples")
        hits += found.interval[0] <= -0.5 <= found.interval[1], 0
        hits += 0, found.prefactor_interval[0] <= 3.0 <= found.prefactor_interval[1]
    return float(hits.min() / repeats)


def test_intervals_of_powers_cover() -> None:
    assert 0.91 <= coverage(4) <= 0.985


def test_a_normal_quantile_in_place_of_students_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "student", lambda level, dof: 1.96)
    assert coverage(4) < 0.91


def test_settings_and_sizes_of_a_power_law() -> None:
    rows = [{**row, "steps": steps, "norm": -row["norm"] * steps} for row in powers(0, 2) for steps in (1, 2)]
    with pytest.raises(CurvlensError, match=r"They differ in 'steps'. Choose one"):
        power_law(rows, "norm", "samples", size=True)
    with pytest.raises(CurvlensError, match=r"negative in 8 of 8 rows .* it has no logarithm. Fit its size: size=True"):
        power_law(rows, "norm", "samples", where={"steps": 1})
    found = power_law(rows, "norm", "samples", where={"steps": 2}, size=True)
    plain = power_law(powers(0, 2), "norm", "samples")
    assert found.exponent == pytest.approx(plain.exponent, rel=1e-12)
    assert found.prefactor == pytest.approx(2 * plain.prefactor, rel=1e-12)


def test_bad_input_of_power_laws() -> None:
    rows = powers(0, 2)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: power_law(rows, "nrm", "samples"), r"no column 'nrm'. Did you mean 'norm'"),
        (lambda: power_law([], "norm", "samples"), "has no records"),
        (lambda: power_law(rows[:2], "norm", "samples"), "There are 2 values and 1 such seeds"),
        (lambda: power_law(rows, "norm", "samples", where={"samples": 5}), "No row has numbers"),
        (lambda: power_law(rows, "norm", "samples", level=1.5), "level=1.5"),
        (lambda: power_law(rows, "norm", "samples", level="a"), "level='a', expected a probability"),  # type: ignore[arg-type]
        (lambda: power_law(rows, "samples", "samples"), "quantity and over are both 'samples', and y = x is no law"),
        (lambda: power_law(rows, None, "samples"), "None is a NoneType, expected the name of a column"),  # type: ignore[arg-type]
        (lambda: power_law([{**r, "seed": [1]} for r in rows], "norm", "samples"), r"seed=\[1\], a list. Expected a"),
        (lambda: power_law([{**r, "norm": 10**400} for r in rows], "norm", "samples"), "'norm' has a number beyond"),
        (lambda: power_law([{**r, "norm": 0.0} for r in rows], "norm", "samples"), "is zero in 8 of 8"),
        (lambda: power_law([{**r, "norm": None} for r in rows], "norm", "samples"), "No row has numbers"),
    ]
    for call, message in cases:
        with pytest.raises(CurvlensError, match=message):
            call()


def test_seeds_keep_their_labels() -> None:
    """The first of three seeds lacks a value: the others are not renamed, and it is said."""
    rows = [{**row, "seed": (5, 9, 11)[row["seed"]]} for row in powers(0, 3)]
    whole = power_law(rows, "norm", "samples")
    assert (whole.seeds, whole.note) == ([5, 9, 11], "")
    found = power_law(rows[1:], "norm", "samples")
    assert found.seeds == [9, 11]
    measured = {(row["seed"], row["samples"]): row["norm"] for row in rows}
    assert {row["seed"] for row in found.table()} == {9, 11}
    assert all(row["y"] == measured[row["seed"], row["x"]] for row in found.table())
    assert found.note == "1 of 3 seeds left out, without norm at every samples: 5"
    assert found.note in str(found)
    never = [{**row, "norm": None} if row["seed"] == 5 else row for row in rows]
    assert power_law(never, "norm", "samples").note == found.note  # as for a training that diverged
    many = [*rows, *({"samples": 16, "seed": f"s{i}", "norm": 1.0} for i in range(8))]
    assert power_law(many, "norm", "samples").note.endswith(": s0, s1, s2, s3, s4, s5 and 2 more")


@pytest.mark.parametrize("name", ["law", "low", "high", "seeds", "x", "y"])
def test_columns_of_a_power_do_not_collide(name: str) -> None:
    rows = powers(0, 2)
    plain = power_law(rows, "norm", "samples")
    as_y = power_law([{**row, name: row["norm"]} for row in rows], name, "samples")
    as_x = power_law([{**row, name: row["samples"]} for row in rows], "norm", name)
    assert list(plain.table()[0]) == ["x", "y", "seed", "law", "low", "high"]
    assert plain.table() == as_y.table() == as_x.table()


def test_real_numbers_of_every_kind() -> None:
    rows = powers(0, 2)
    truth = power_law(rows, "norm", "samples")
    for whole in (np.int64, np.int32, np.float32, Fraction, torch.tensor, np.array):
        for real in (np.float64, torch.tensor, np.array):
            given = [{**row, "samples": whole(row["samples"]), "norm": real(row["norm"])} for row in rows]
            found = power_law(given, "norm", "samples")
            assert found.exponent == pytest.approx(truth.exponent, rel=1e-6)
            assert found.table()[0]["x"] == 16.0
    for seed in (np.int64, torch.tensor):
        assert power_law([{**row, "seed": seed(row["seed"])} for row in rows], "norm", "samples").seeds == [0, 1]
    for no in (True, np.True_, torch.tensor(True), 1j, "1", torch.ones(1)):
        with pytest.raises(CurvlensError, match="No row has numbers"):
            power_law([{**row, "norm": no} for row in rows], "norm", "samples")


def test_a_power_law_at_the_ends_of_float64(tmp_path: Path) -> None:
    """The prefactor 1e-1000 is no float64; the law at the measured places is."""
    found = power_law([{"n": 1e200 * i, "q": float(i) ** 5} for i in (1, 2, 3, 4)], "q", "n")
    assert found.prefactor == 0.0
    assert found.log_prefactor == pytest.approx(-1000 * math.log(10), rel=1e-9)
    for row in found.table():
        assert row["law"] == pytest.approx(row["y"], rel=1e-9)
    assert (found(1e-300), found(10**400)) == (0.0, math.inf)
    assert "q = exp(-2302.59) n^5" in str(found)
    found.plot(tmp_path / "x.svg")
    assert "NaN" not in (tmp_path / "x.svg").read_text()
    for x in (0.0, -1.0, math.nan):
        with pytest.raises(CurvlensError, match="has no logarithm"):
            found(x)
    values = {0: (1.0, 1e300, 1.0), 1: (1e300, 1.0, 1e-300)}
    wide = [{"n": 2.0**i, "q": q, "seed": seed} for seed, each in values.items() for i, q in enumerate(each)]
    power_law(wide, "q", "n").plot(tmp_path / "x.svg")  # an interval from 0 to infinity
    assert "NaN" not in (tmp_path / "x.svg").read_text()


# The loss law


def test_numbers_beyond_float64_and_wrong_widths() -> None:
    rows = [{"n": n * 1e6, "y": float(n) ** -60} for n in (1, 2, 3)]
    assert power_law(rows, "y", "n").exponent == pytest.approx(-60)
    for delta in (0.0, -1.0, math.nan):
        with pytest.raises(CurvlensError, match="delta="):
            loss_law(planted(), bootstrap=20, delta=delta)
    with pytest.raises(CurvlensError) as caught:
        loss_law([{**row, "test_loss": -1.0} for row in planted()], bootstrap=20)
    assert "size=True" not in str(caught.value)


def test_a_planted_law_is_found() -> None:
    found = loss_law(planted(), bootstrap=20)
    for name, value in LAW.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name
    assert found.residual < 1e-6
    assert (len(found.loss), found.settings, found.at_bounds) == (32, 16, [])
    assert found(1000, 100) == pytest.approx(0.8 + 30 / 1000**0.6 + 12 / 100**0.45, rel=1e-4)
    assert "E 0.8" in str(found)
    assert found.table()[0]["law"] == pytest.approx(found.table()[0]["loss"], rel=1e-4)


def test_a_law_far_from_its_data() -> None:
    found = loss_law(planted(), bootstrap=20)
    assert found(1e300, 1e300) == pytest.approx(found.E, rel=1e-9)
    assert found(10**400, 1) > found.E
    with pytest.raises(CurvlensError, match="N=0, D=5: the law is for numbers above 0"):
        found(0, 5)


def test_without_a_term_it_says_so() -> None:
    """No irreducible loss: E is at the least that is tried."""
    rows = [{**row, "test_loss": row["test_loss"] - LAW["E"]} for row in planted()]
    found = loss_law(rows, bootstrap=20)
    assert 0.005 * min(row["test_loss"] for row in rows) > found.E
    assert found.beta == pytest.approx(LAW["beta"], rel=1e-2)
    assert not found.at_bounds or found.at_bounds == ["E"]


def test_the_gradient_of_the_objective() -> None:
    """Against finite differences, with other quantities beside, on both branches of Huber's loss."""
    data = fits._Losses.of(planted(0.1), "test_loss", "parameters", "samples", ["q"], None)
    p = np.array([-0.5, -0.3, 0.4, 0.2, 0.6, 0.1])
    for delta in (1e-3, 0.3):
        _, slope = data.objective(p, delta)
        for i in range(len(p)):
            step = 1e-6 * np.eye(len(p))[i]
            middle = (data.objective(p + step, delta)[0] - data.objective(p - step, delta)[0]) / 2e-6
            assert slope[i] == pytest.approx(middle, rel=1e-4, abs=1e-9)


def wrong(power: float) -> Callable[..., np.ndarray]:
    real = fits.law_of

    def law_of(terms: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return real(terms, power * x, y)

    return law_of


def test_a_wrong_power_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "law_of", wrong(2.0))
    with pytest.raises(AssertionError):
        test_a_planted_law_is_found()


def law_coverage(repeats: int, bootstrap: int) -> dict[str, float]:
    hits = dict.fromkeys(LAW, 0)
    for repeat in range(repeats):
        found = loss_law(planted(0.02, repeat, seeds=3), bootstrap=bootstrap)
        for name, (low, high) in found.intervals.items():
            hits[name] += low <= LAW[name] <= high
    return {name: count / repeats for name, count in hits.items()}


@pytest.mark.full
def test_intervals_of_the_law_cover() -> None:
    assert min(law_coverage(100, 100).values()) >= 0.88


@pytest.mark.full
def test_too_few_draws_of_settings_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drawing settings again, intervals are points."""
    monkeypatch.setattr(fits._Losses, "resampled", lambda self, draws: self)
    assert min(law_coverage(10, 20).values()) < 0.5


def test_intervals_grow_with_the_noise() -> None:
    narrow, wide = (loss_law(planted(noise), bootstrap=30).intervals["beta"] for noise in (0.005, 0.05))
    assert wide[1] - wide[0] > 4 * (narrow[1] - narrow[0])


def test_bad_input_of_the_law() -> None:
    rows = planted()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: loss_law(rows, bootstrap=3), "bootstrap=3, expected a number of fits, 20 or more"),
        (lambda: loss_law([r for r in rows if r["samples"] < 100]), r"4 values of 'parameters', 2 of 'samples'"),
        (lambda: loss_law(rows, loss="loss"), "no column 'loss'. Did you mean 'test_loss'"),
        (lambda: loss_law([{**r, "test_loss": -1.0} for r in rows]), "negative in 32 of 32"),
    ]
    for call, message in cases:
        with pytest.raises(CurvlensError, match=message):
            call()


# What curvature adds


def test_a_quantity_that_matters_predicts_better() -> None:
    found = curvature_gain(planted(0.02, hidden=0.3), "q")
    assert found.interval[0] > 0
    assert found.with_curvature.mean() < 0.2 * found.without.mean()
    assert found.difference == pytest.approx(float((found.without - found.with_curvature).mean()), rel=1e-12)
    assert len(found.without) == 16
    assert "16 settings left out" in str(found)
    assert found.curvature == ["q"]
    assert [(r["parameters"], r["samples"]) for r in found.table()] == [(N, D) for N in SIZES for D in SAMPLES]


def test_a_quantity_that_does_not_matter_does_not() -> None:
    found = [curvature_gain(planted(0.05, seed, seeds=1), "q") for seed in range(2)]
    assert all(each.interval[0] < 0.01 for each in found)
    assert sum(each.difference for each in found) < 0.01


def test_it_is_out_of_sample() -> None:
    """A quantity that is the noise itself in one setting helps there, in sample; a fit without it cannot use it."""
    rows = planted(0.02, seeds=1)
    for row in rows:
        spoiled = row["parameters"] == SIZES[1] and row["samples"] == SAMPLES[2]
        row["q"] = math.e if spoiled else 1.0
        row["test_loss"] *= 2.0 if spoiled else 1.0
    found = curvature_gain(rows, "q")
    place = SIZES.index(SIZES[1]) * len(SAMPLES) + 2
    assert float(found.with_curvature[place]) == pytest.approx(math.log(2), abs=0.1)


def test_the_left_out_setting_is_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left out that prediction would be near: the fault would be seen."""
    real = fits._Losses.part

    def leaky(self: fits._Losses, keep: np.ndarray) -> fits._Losses:
        return real(self, keep if keep.sum() < len(keep) / 2 else np.ones_like(keep))

    monkeypatch.setattr(fits._Losses, "part", leaky)
    monkeypatch.setattr(fits._Losses, "standard", lambda self, known: self)
    with pytest.raises(AssertionError):
        test_it_is_out_of_sample()


def test_both_predictions_are_of_the_same_models() -> None:
    """A model whose curvature was not measured is left out of both, or they would be compared on other data."""
    rows = planted(0.05, hidden=0.3)
    gap = [{**row, "q": None} if row["seed"] == 1 and row["samples"] == 64 else row for row in rows]
    full = [row for row in gap if row["q"] is not None]
    assert curvature_gain(gap, "q").without.tolist() == curvature_gain(full, "q").without.tolist()


def test_nothing_is_left_beside_the_same_quantity() -> None:
    found = curvature_gain(planted(0.02, hidden=0.3), "q", beside="train_loss")
    assert found.without.mean() < 1e-3  # here it is the loss itself
    assert abs(found.difference) < 1e-3


def test_bad_input_of_the_gain() -> None:
    rows = planted()
    few = [r for r in rows if (r["parameters"] < 1000) + (r["samples"] < 50) + (r["parameters"] < 300) > 1]
    few += [r for r in rows if r["parameters"] == 1200 and r["samples"] < 100]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: curvature_gain(rows, []), r"curvature=\[\] names no quantity"),
        (lambda: curvature_gain(rows, [1]), r"curvature=\[1\] has an int, expected names of quantities"),  # type: ignore[list-item]
        (lambda: curvature_gain(rows, None), "curvature=None has a NoneType, expected names"),  # type: ignore[arg-type]
        (lambda: curvature_gain(rows, "q", beside=[2]), r"beside=\[2\] has an int"),  # type: ignore[list-item]
        (lambda: curvature_gain(rows, ["q", "q"]), "curvature names 'q' twice. Name each quantity once"),
        (lambda: curvature_gain(rows, "q", beside="q"), "'q' is in curvature and in beside. .* adds nothing"),
        (lambda: curvature_gain(rows, "test_loss"), "curvature names 'test_loss', which is what is predicted"),
        (lambda: curvature_gain(rows, "q", beside="test_loss"), "beside names 'test_loss', which is what is predicted"),
        (lambda: curvature_gain(rows, ["q", "samples"]), "curvature names 'samples', which is part of the law already"),
        (lambda: curvature_gain(rows, "parameters"), "curvature names 'parameters', which is part of the law already"),
        (lambda: curvature_gain(rows, "p"), "no column 'p'"),
        (lambda: curvature_gain([{**r, "q": -1.0} for r in rows], "q"), "'q' is negative in 32 of 32"),
        (lambda: curvature_gain(few, "q"), "7 settings .* are too few to leave one out and fit 6 numbers"),
    ]
    for call, message in cases:
        with pytest.raises(CurvlensError, match=message):
            call()
