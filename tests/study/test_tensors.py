"""Tensors beside the rows: to the bit, checked when they are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from curvlens import CurvlensError, files
from curvlens.study import Record, Study, table
from curvlens.study.tensors import packed

V = torch.tensor([0.1, float("nan"), -0.0, float("inf")], dtype=torch.float64)


def record(number: int = 0, **tensors: Any) -> Record:
    return Record("eigs", 1, {"k": number}, {"value": 0.1}, tensors=tensors or {"v": V})


def file_of(folder: Path) -> Path:
    (file,) = (folder / "tensors").glob("*.safetensors")
    return file


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_all_bits_are_kept(patterns: list[int]) -> None:
    """Those of a NaN, too."""
    from safetensors.torch import load

    v = torch.tensor(patterns, dtype=torch.int64).view(torch.float64)
    _, content = packed({"v": v})
    assert load(content)["v"].view(torch.int64).tolist() == patterns


def test_tensors_come_back(tmp_path: Path) -> None:
    study = Study(tmp_path)
    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    given = {"a": whole[:, 1:3], "b": whole.T, "c": torch.tensor(1, dtype=torch.bfloat16), "d": torch.zeros(0, 2)}
    study.add(record(0, **given))
    (found,) = Study(tmp_path).records("eigs").values()
    assert sorted(found.tensors) == sorted(given)
    for name, tensor in given.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    with pytest.raises(KeyError):
        found.tensors["e"]
    assert load_file(file_of(tmp_path)).keys() == given.keys()


def test_the_same_bits_are_one_file(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.add(record(0))
    study.add(record(1))
    study.add(record(0))  # again
    assert file_of(tmp_path).stem in table(study.records("eigs"))
    with pytest.raises(CurvlensError, match="another result"):
        study.add(record(0, v=V + 1))


def test_numbers_are_read_without_tensors(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.add(record())
    file_of(tmp_path).unlink()
    (found,) = study.records("eigs").values()
    assert found.result == {"value": 0.1}
    assert list(found.tensors) == ["v"]
    assert "'v' in" in repr(found.tensors)
    with pytest.raises(CurvlensError, match=r"is missing\. It holds the tensors 'v' of a record\. Copy the file"):
        found.tensors["v"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: c[:-1], r"is cut off: \d+ B of \d+ B are there"),
        (lambda c: b"", "is cut off: 0 B of"),
        (lambda c: c[:-1] + b"!", "was changed"),
        (lambda c: c + b"!", "is not the file that was stored"),
    ],
)
def test_damage_is_told_and_mended_by_adding_again(tmp_path: Path, damage: Any, said: str) -> None:
    study = Study(tmp_path)
    study.add(record(0))
    file = file_of(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.raises(CurvlensError, match=said):
        next(iter(Study(tmp_path).records("eigs").values())).tensors["v"]
    study.add(record(1))  # the same tensors
    assert file.read_bytes() == whole
    assert file.with_name(f"{file.name}.aside-1").read_bytes() == damage(whole)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_told(tmp_path: Path, kind: str) -> None:
    study = Study(tmp_path)
    study.add(record(0))
    file = file_of(tmp_path)
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(CurvlensError, match="is not the file that was stored"):
        next(iter(study.records("eigs").values())).tensors["v"]


def test_the_file_is_there_before_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path)

    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    study.add(record(0))
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(CurvlensError, match=r"no space is left there\. All results before are kept"):
            study.add(record(1, v=V + 1))
    assert len(study.records("eigs")) == 1
    study.add(record(1, v=V + 1))
    assert len(study.records("eigs")) == 2


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.add(record(0))
    (tmp_path / "tensors" / f".curvlens-{'0' * 16}.new").write_bytes(b"half")
    (tmp_path / "tensors" / "notes").write_text("mine")
    study.add(record(1))
    assert sorted(f.name for f in (tmp_path / "tensors").iterdir()) == sorted([file_of(tmp_path).name, "notes"])


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ([1.0], "is of type list"),
        (torch.eye(2).to_sparse(), "is sparse"),
        (torch.ones(2, dtype=torch.complex128), "view_as_real"),
        (torch.ones(2).to(torch.float8_e8m0fnu), "in another dtype"),
        (torch.ones(2, device="meta"), "is on the device 'meta'"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "is nested"),
    ],
)
def test_what_safetensors_cannot_hold_is_told(tmp_path: Path, tensor: Any, said: str) -> None:
    study = Study(tmp_path)
    with pytest.raises(CurvlensError, match=said):
        study.add(record(v=tensor))
    assert study.records("eigs") == {}


def test_a_name_that_safetensors_keeps_is_told(tmp_path: Path) -> None:
    study = Study(tmp_path)
    with pytest.raises(CurvlensError, match="Rename the tensor"):
        study.add(record(__metadata__=V))
    assert study.records("eigs") == {}
