"""The random numbers of the experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from curvlens.papers import EXPERIMENTS, Effort, Experiment
from curvlens.papers.draws import Draws, stream


def test_purposes_of_one_seed_are_independent() -> None:
    """Over many seeds, no number of one stream is correlated with the same or another number of the other."""
    seeds, first = range(400), 12
    one, other = (torch.stack([Draws(seed, each)(first) for seed in seeds]) for each in ("", "noise"))
    again = torch.stack([Draws(seed, "noise")(first) for seed in seeds])
    assert torch.equal(other, again)
    crossed = (one - one.mean(0)).T @ (other - other.mean(0)) / len(seeds)
    assert float(crossed.abs().max()) < 5 / len(seeds) ** 0.5
    assert len({stream(seed, each) for seed in range(1000) for each in ("", "noise", "weights")}) == 3000


def test_a_seed_without_a_purpose_is_the_stream_that_stored_points_are_of() -> None:
    plain = torch.randn(3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert torch.equal(Draws(7)(3), plain)


TRAINED = {
    "convergence-rate",
    "critical-batch",
    "depth",
    "training",
    "sink-gpt",
    "feedforward",
    "within-block",
    "layer-coupling",
    "step-sizes",
    "data-convergence",
    "second-order",
    "scaling",
    "step-edge",
    "adam-edge",
    "recommendations",
    "block-order",
    "block-heterogeneity",
    "forecast-departure",
    "ggn-top-training",
}
"""Draw their networks in one go, by torch's own generator; `published` as the authors do."""


@pytest.mark.parametrize(
    "experiment",
    [e for e in EXPERIMENTS if not e.data and e.name not in TRAINED | {"published", "published-deep"}],
    ids=lambda experiment: experiment.name,
)
def test_no_point_draws_one_stream_twice(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """One point of each kind: two streams of the same seed and purpose would be the same numbers."""
    built: list[tuple[int, str]] = []
    init = Draws.__init__

    def noted(self: Draws, seed: int, purpose: str = "") -> None:
        built.append((seed, purpose))
        init(self, seed, purpose)

    monkeypatch.setattr(Draws, "__init__", noted)
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for config in experiment.points(Effort(quick=True, seeds=1)):
        kinds.setdefault(tuple(value for value in config.values() if isinstance(value, str)), config)
    for config in kinds.values():
        built.clear()
        experiment.measure(config)
        assert len(built) == len(set(built)) >= 1, config


def test_draws_for_two_purposes_are_independent() -> None:
    same, tokens_, weights = Draws(3)(50_000), Draws(3, "tokens")(50_000), Draws(3, "weights")(50_000)
    assert torch.equal(same, torch.randn(50_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert torch.equal(tokens_, Draws(3, "tokens")(50_000))
    for a, b in ((same, tokens_), (tokens_, weights), (tokens_, Draws(4, "tokens")(50_000))):
        assert abs(float((a * b).mean())) < 5 / math.sqrt(50_000)
