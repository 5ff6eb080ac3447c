"""The colours of heat maps are told apart with red-green blindness."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from curvlens.report.assets import asset

SEEN = {
    "all": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, complete: what is seen of linear RGB
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def ramp(name: str) -> list[str]:
    found = re.search(rf"{name} = \[(.*?)\]", asset("heat_map.js"))
    assert found
    return re.findall(r'"(#\w{6})"', found[1])


def lab(colour: str, seen: Any) -> Any:
    """CIE L*a*b* of a colour, as it is seen."""
    coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded > 0.04045, ((coded + 0.055) / 1.055) ** 2.4, coded / 12.92)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(seen @ linear, 0.001, 1) / (to_xyz @ np.ones(3)))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SEEN)
def test_the_sequential_scale_grows_lighter_and_its_steps_are_seen(sight: str) -> None:
    colours = [lab(colour, SEEN[sight]) for colour in ramp("VIRIDIS")]
    assert all(after[0] > before[0] + 3 for before, after in pairwise(colours))


@pytest.mark.parametrize("sight", SEEN)
def test_the_two_signs_are_told_apart_at_each_size(sight: str) -> None:
    colours = [lab(colour, SEEN[sight]) for colour in ramp("SIGNED")]
    halves = zip(colours[:4], reversed(colours[5:]), strict=True)
    assert min(np.linalg.norm(minus - plus) for minus, plus in halves) > 20
