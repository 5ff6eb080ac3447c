"""Pictures of laws: every trained model is a point, and the law is the one that was fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import curvlens as cl

SAVED = Path(__file__).parent.parent / "results" / "saved"


def records(chart: Any) -> list[list[dict[str, Any]]]:
    """The data of each layer."""
    return [layer["data"]["values"] for layer in chart.to_dict()["layer"]]


def test_a_power_has_its_models_and_its_law() -> None:
    power: Any = cl.load(SAVED / "power")
    found = records(power.plot())
    (points,) = [rows for rows in found if "low" not in rows[0]]
    law = next(rows for rows in found if "low" in rows[0])
    assert sorted(row["y"] for row in points) == sorted(power.y.flatten().tolist())
    assert all(row["y"] == power(row["x"]) and row["low"] < row["y"] < row["high"] for row in law)


@pytest.mark.parametrize("over", ["samples", "parameters"])
def test_a_loss_law_has_a_line_for_each_size(over: str) -> None:
    law: Any = cl.load(SAVED / "loss-law")
    found = records(law.plot(over=over))
    curves = max(found, key=len)
    (points,) = [rows for rows in found if len(rows) == len(law.loss)]
    assert {row["size"] for row in curves} == {row["size"] for row in points}
    for row in curves[::17]:
        other = float(row["size"].replace(",", ""))
        expected = law(other, row["x"]) if over == "samples" else law(row["x"], other)
        assert row["y"] == pytest.approx(expected, rel=1e-12)


def test_a_loss_law_over_something_else() -> None:
    with pytest.raises(cl.CurvlensError, match="over='steps', expected 'samples' or 'parameters'"):
        cl.load(SAVED / "loss-law").plot(over="steps")


def test_a_gain_has_a_point_for_each_setting() -> None:
    gain: Any = cl.load(SAVED / "gain")
    assert len(gain.without) in {len(rows) for rows in records(gain.plot())}
    exact = replace(gain, without=torch.zeros_like(gain.without))
    with pytest.raises(cl.CurvlensError, match="There is nothing to draw: every prediction is exact"):
        exact.plot()
