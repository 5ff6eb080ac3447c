"""Rows: numbers to the bit, and rows of the format before as they are."""

from __future__ import annotations

import gzip
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvlens import CurvlensError
from curvlens.study import Record, Study, table
from curvlens.study.rows import HEADS, line, parsed

COMMITTED = Path(__file__).parents[2] / "results" / "table.jsonl.gz"
OLD = (
    b'{"curvlens results":1}\n'
    b'{"key":"3326abf1f219385c","experiment":"bounds","revision":1,"config":{"of":"attention","seed":0,"sigma":0.01},'
    b'"result":{"prior":13.18108546,"data":1.001012749},"check":"eab2e1","seconds":0.25}\n'
)
"""A file as it was written before format 2."""
names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: not name.startswith("$"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """A value with floats as their bits; every NaN is the same one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, list) else (type(value).__name__, value)


@given(st.dictionaries(names, values, max_size=4))
def test_what_is_stored_comes_back_to_the_bit(result: dict[str, Any]) -> None:
    record = Record("a", 1, {}, result)
    text = line(record)
    assert text.count("\n") == 1
    json.loads(text, parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity
    assert bits(parsed(text.encode()).result) == bits(result)


@given(st.integers(0, 2**64 - 1))
def test_every_float_there_is_comes_back(pattern: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", pattern))
    assert bits(parsed(line(Record("a", 1, {}, {"x": value})).encode()).result) == bits({"x": value})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_configurations_are_exact(value: float) -> None:
    record = Record("a", 1, {"x": value}, {})
    assert struct.pack("<d", parsed(line(record).encode()).config["x"]) == struct.pack("<d", value)
    beside = math.nextafter(value, math.inf)
    assert math.isinf(beside) or Record("a", 1, {"x": beside}, {}).key != record.key


def test_infinities_are_floats_again_and_texts_stay_texts() -> None:
    result = {"x": [math.inf, -math.inf, -0.0, "inf", "nan"]}
    text = line(Record("a", 1, {}, result))
    assert '[{"$float":"inf"},{"$float":"-inf"},-0.0,"inf","nan"]' in text
    assert bits(parsed(text.encode()).result) == bits(result)


def test_one_changed_bit_is_noticed() -> None:
    text = line(Record("a", 1, {}, {"x": 0.1}))
    changed = text.replace("0.1", repr(math.nextafter(0.1, 1)))
    with pytest.raises(ValueError, match="its numbers were changed"):
        parsed(changed.encode())


@pytest.mark.parametrize("value", ['{"$float":"1e999"}', '{"$float":[]}', '{"$float":"inf","x":1}', "1e999", "NaN"])
def test_floats_by_other_names_are_damage(value: str) -> None:
    text = line(Record("a", 1, {}, {"x": 0.5})).replace("0.5", value)
    with pytest.raises(ValueError, match=r"."):
        parsed(text.encode())


# Both formats


def test_the_committed_table_comes_out_the_same() -> None:
    """Every byte but the seal in its first line."""
    old = gzip.decompress(COMMITTED.read_bytes()).split(b"\n", 1)[1]
    study = Study(COMMITTED.parent)
    rows = [json.loads(row) for row in old.splitlines()]
    formats = {1 if "experiment" in row else 2 for row in rows}
    assert formats == {1, 2}  # points of the first full run, and those that were added
    kinds = {row.get("experiment") or row["kind"] for row in rows}
    records = {key: record for kind in kinds for key, record in study.records(kind).items()}
    head, new = table(records).encode().split(b"\n", 1)
    assert head + b"\n" == HEADS[2].encode()
    assert new == old


def test_rows_can_be_added_to_a_file_of_format_1(tmp_path: Path) -> None:
    (tmp_path / "bounds.jsonl").write_bytes(OLD)
    study = Study(tmp_path)
    (old,) = study.records("bounds").values()
    assert (old.result, old.seconds, old.format) == ({"prior": 13.18108546, "data": 1.001012749}, 0.25, 1)
    for sigma in (0.5, 0.6):
        study.add(Record("bounds", 1, {"sigma": sigma}, {"prior": 1 / 3, "data": math.inf}))
    assert (tmp_path / "bounds.jsonl").read_bytes().startswith(OLD + HEADS[2].encode() + b'{"key":"')
    assert (tmp_path / "bounds.jsonl").read_bytes().count(HEADS[2].encode()) == 1
    found = list(Study(tmp_path).records("bounds").values())
    assert [record.format for record in found] == [1, 2, 2]
    assert found[1].result == {"prior": 1 / 3, "data": math.inf}
    mixed = table(study.records("bounds"))
    assert mixed.startswith(HEADS[2])
    assert OLD.splitlines()[1].decode().replace(',"seconds":0.25', "") in mixed.splitlines()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "table.jsonl.gz").write_bytes(gzip.compress(mixed.encode()))
    assert Study(tmp_path / "other").records("bounds") == study.records("bounds")


def test_every_cut_of_a_mixed_file_is_mended(tmp_path: Path) -> None:
    """As if the process that added the first row of format 2 was killed after any number of bytes."""
    new = Record("bounds", 1, {"sigma": 0.5}, {"prior": 1 / 3})
    whole = OLD + HEADS[2].encode() + line(new).encode()
    file = tmp_path / "bounds.jsonl"
    for length in range(len(OLD), len(whole)):
        file.write_bytes(whole[:length])
        assert 1 <= len(Study(tmp_path).records("bounds")) <= 2
        Study(tmp_path).add(new)
        assert file.read_bytes() == whole


def test_a_row_of_format_2_below_a_first_line_of_format_1_is_damage(tmp_path: Path) -> None:
    (tmp_path / "bounds.jsonl").write_bytes(OLD + line(Record("bounds", 1, {}, {})).encode())
    with pytest.raises(CurvlensError, match=r"line 3 \(it has format 2 in a file of format 1"):
        Study(tmp_path).records("bounds")
