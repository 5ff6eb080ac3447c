"""Pictures of training: the curves of a forecast, and what they say of a model that runs away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import curvlens as cl

SAVED = Path(__file__).parent.parent / "results" / "saved"


def forecast(losses: list[float]) -> Any:
    true = torch.tensor([1.0, 0.9, 0.8, 0.7], dtype=torch.float64)
    found: Any = cl.load(SAVED / "forecast")
    values = torch.tensor(losses, dtype=torch.float64)
    return replace(found, losses=values, distances=true, true_losses=true, true_distances=true, departure=2, mean=None)


def test_the_colours_of_a_forecast() -> None:
    """True and model are far apart, and the parting step is no third curve."""
    curves = forecast([1.0, 0.9, 0.7, 0.6]).plot().to_dict()
    scale = curves["layer"][0]["encoding"]["color"]["scale"]
    colours = dict(zip(scale["domain"], scale["range"], strict=True))
    assert colours == {"true": "#3b4252", "quadratic model": "#d55e00", "parts by 5 %": "#7b8494"}
    assert curves["layer"][1]["mark"]["strokeDash"]
    assert "title" not in curves


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([1.0, 0.5, -30.0, -500.0], "the quadratic model leaves the picture: to -500 at step 3"),
        ([1.0, 9.0, 1e200, float("inf")], "the quadratic model leaves the picture: beyond float64 at step 3"),
        ([1.0, 9.0, 0.9, 0.8], "the quadratic model leaves the picture: to 9 at step 1"),
    ],
)
def test_it_says_to_what_a_model_goes_that_leaves_the_picture(losses: list[float], said: str, tmp_path: Path) -> None:
    found = forecast(losses)
    assert found.plot(tmp_path / "x.svg").to_dict()["title"] == [said]
    assert said in (tmp_path / "x.svg").read_text()
    assert "title" not in found.plot(what="distance").to_dict()
