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


def test_sizes_that_round_alike_are_told_apart() -> None:
    """Sizes in millions: 0.3 and 0.4 are two lines, not one."""
    law: Any = cl.load(SAVED / "loss-law")
    for factor, names in ((1e-6, ("0.00025", "0.00056", "0.0012", "0.0027")), (1.0, ("250", "560", "1,200", "2,700"))):
        scaled = replace(law, N=torch.tensor([250.0, 560.0, 1200.0, 2700.0]).double().repeat_interleave(8) * factor)
        scaled = replace(scaled, D=law.D[:1].repeat(32), loss=law.loss[:1].repeat(32))
        assert {row["size"] for row in max(records(scaled.plot()), key=len)} == set(names)
    close = replace(law, N=torch.tensor([1.2, 1.2000001], dtype=torch.float64), D=law.D[:2], loss=law.loss[:2])
    assert {row["size"] for row in max(records(close.plot()), key=len)} == {"1.2", "1.2000001"}


@pytest.mark.parametrize("name", ["constructor", "toString", "hasOwnProperty", "__proto__"])
def test_names_that_javascript_knows_in_titles(name: str, tmp_path: Path) -> None:
    power: Any = cl.load(SAVED / "power")
    scaling: Any = cl.load(SAVED / "scaling")
    gain: Any = cl.load(SAVED / "gain")
    ones = torch.ones(3, dtype=torch.float64)
    settings = {name: [1, 2, 3], "seed": [0, 0, 0]}
    drawn = {
        "y": replace(power, quantity=name).plot(tmp_path / "y.svg"),
        "x": replace(power, over=name).plot(tmp_path / "x.svg"),
        "number": replace(scaling, settings=settings, values={"y": ones}, errors={}).plot(
            tmp_path / "number.svg", what="y"
        ),
        "text": replace(
            scaling, settings={"kind": [name, "a", "b"], "seed": [0] * 3}, values={name: ones}, errors={}
        ).plot(tmp_path / "text.svg", what=name),
        "gain": replace(gain, curvature=[name]).plot(tmp_path / "gain.svg"),
    }
    for file in drawn:
        text = (tmp_path / f"{file}.svg").read_text()
        shown = name.replace("_", " ").strip() if file in ("number", "text") else name
        assert f">{shown}<" in text or f"with {name}<" in text, file
        assert ">=" not in text


def test_a_loss_law_over_something_else() -> None:
    with pytest.raises(cl.CurvlensError, match="over='steps', expected 'samples' or 'parameters'"):
        cl.load(SAVED / "loss-law").plot(over="steps")


def test_a_gain_has_a_point_for_each_setting() -> None:
    gain: Any = cl.load(SAVED / "gain")
    assert len(gain.without) in {len(rows) for rows in records(gain.plot())}
    exact = replace(gain, without=torch.zeros_like(gain.without))
    with pytest.raises(cl.CurvlensError, match="There is nothing to draw: every prediction is exact"):
        exact.plot()
