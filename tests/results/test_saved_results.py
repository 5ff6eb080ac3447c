"""Results that an earlier version saved, in format 1: they load with the same numbers and with a status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import curvlens as cl
from curvlens.results import ByBlock, Result, Status

SAVED = Path(__file__).parent / "saved"
NUMBERS: dict[str, Any] = json.loads((SAVED / "numbers.json").read_text())
"""What ``str`` and ``to_dict`` of the earlier version gave."""
NEWER = {
    "Attribution",
    "Convergence",
    "DataSize",
    "Forecast",
    "Gain",
    "Landscape",
    "Line",
    "LossLaw",
    "Noise",
    "Power",
    "Scaling",
    "Stability",
    "Update",
}
"""Kinds of result that there were none of in format 1."""
STATUSES = {
    "amount": Status.SAMPLED,
    "blocks-budget": Status.STOPPED_AT_BUDGET,
    "blocks-budget-unmeasured": Status.STOPPED_AT_BUDGET,
    "blocks-interrupted": Status.INTERRUPTED,
    "blocks-not-reached": Status.ACCURACY_NOT_REACHED,
    "blocks-roots-budget": Status.STOPPED_AT_BUDGET,
    "blocks-roots-interrupted": Status.INTERRUPTED,
    "blocks-sampled": Status.SAMPLED,
    "density-exact": Status.EXACT,
    "density-sampled": Status.SAMPLED,
    "eigs-converged": Status.CONVERGED,
    "eigs-interrupted": Status.INTERRUPTED,
    "eigs-rounding": Status.STALLED,
    "eigs-stopped": Status.STOPPED_AT_BUDGET,
    "eigs-whole-space": Status.CONVERGED,
    "estimate-accurate": Status.SAMPLED,
    "estimate-diagonal": Status.SAMPLED,
    "estimate-exact": Status.EXACT,
    "estimate-interrupted": Status.INTERRUPTED,
    "estimate-not-measured": Status.NOT_MEASURED,
    "estimate-not-reached": Status.ACCURACY_NOT_REACHED,
    "estimate-sampled": Status.SAMPLED,
    "level": Status.SAMPLED,
    "portion": Status.SAMPLED,
    "profile": Status.SAMPLED,
    "profile-gaps": Status.HAS_GAPS,
    "profile-interrupted": Status.INTERRUPTED,
    "propagation": Status.SAMPLED,
    "report": Status.COMPLETE,
    "report-sick": Status.COMPLETE,
    "row": Status.SAMPLED,
    "solution-converged": Status.CONVERGED,
    "solution-inconsistent": Status.INCONSISTENT,
    "solution-interrupted": Status.INTERRUPTED,
    "solution-negative": Status.NEGATIVE_CURVATURE,
    "solution-stalled": Status.STALLED,
    "solution-stopped": Status.STOPPED_AT_BUDGET,
}


def without_status(value: Any) -> Any:
    """What was there before, with ``why`` as the note it is today."""
    if isinstance(value, list):
        return [without_status(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "why" in value:
        value = {**value, "note": "" if value["why"] == "converged" else value["why"]}
    gone = {"status", "why"} | ({"converged"} if "history" in value else set())
    gone |= {"note"} if "coarse_nodes" in value else set()  # densities had none
    return {key: without_status(item) for key, item in value.items() if key not in gone}


def test_every_kind_is_there() -> None:
    kinds = {json.loads((SAVED / f"{name}.json").read_text())["kind"] for name in NUMBERS}
    assert kinds | NEWER == {*Result.kinds}
    assert set(NUMBERS) == set(STATUSES)
    assert all(json.loads((SAVED / f"{name}.json").read_text())["format"] == 1 for name in NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_old_files_load(name: str, tmp_path: Path) -> None:
    result = cl.load(SAVED / name)
    assert result.status is STATUSES[name]
    assert str(result) == NUMBERS[name]["printed"]
    assert without_status(result.to_dict()) == without_status(NUMBERS[name]["values"])
    again = cl.load(result.save(tmp_path / name))
    assert again.status is result.status
    assert again.to_dict() == result.to_dict()


def test_blocks_have_a_status_each() -> None:
    blocks = cl.load(SAVED / "blocks-budget-unmeasured")
    assert isinstance(blocks, ByBlock)
    assert blocks["h.0.mlp.up"].status is Status.STOPPED_AT_BUDGET
    assert {blocks[name].status for name in blocks.unmeasured} == {Status.NOT_MEASURED}
    assert len(blocks.unmeasured) == len(blocks) - 1


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.startswith("solution")])
def test_solutions_before_they_had_a_word_for_it(name: str, tmp_path: Path) -> None:
    for file in SAVED.glob(f"{name}.*"):
        shutil.copy(file, tmp_path)
    path = tmp_path / f"{name}.json"
    document = json.loads(path.read_text())
    del document["fields"]["status"]
    path.write_text(json.dumps(document))
    solution = cl.load(path)
    assert solution.status is STATUSES[name]
    assert solution.converged == (name == "solution-converged")


def test_a_status_that_is_none(tmp_path: Path) -> None:
    path = cl.load(SAVED / "estimate-exact").save(tmp_path / "estimate")
    path.write_text(path.read_text().replace('"status": "exact"', '"status": "splendid"'))
    with pytest.raises(cl.CurvlensError, match="'splendid' is not a valid Status"):
        cl.load(path)
