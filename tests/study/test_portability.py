"""Systems without the calls of Linux: the attributes are taken away, and everything still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import curvlens as cl
from curvlens import CurvlensError, files, memory
from curvlens.linalg import basis
from curvlens.study import Record, Study

FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has none of them."""
    for name in (*FLAGS, "sysconf", "posix_fallocate", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(memory, "_text", lambda path: "")


@pytest.mark.usefixtures("bare")
def test_files_without_flags(tmp_path: Path) -> None:
    files.write(tmp_path / "a", b"content\r\n\x1a")
    assert files.read(tmp_path / "a", 100) == b"content\r\n\x1a"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CurvlensError, match="is a named pipe"):
        files.read(tmp_path / "pipe", 100)


def test_a_study_without_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY"):  # filelock itself wants O_NONBLOCK on POSIX
        monkeypatch.delattr(os, name)
    (tmp_path / "target").write_text("precious")
    study = Study(tmp_path / "run", identity={"model": 1})
    point = Record("a", 1, {}, {"x": 0.1}, tensors={"v": torch.ones(2)})
    study.add(point)
    assert torch.equal(Study(tmp_path / "run").records("a")[point.key].tensors["v"], torch.ones(2))
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(CurvlensError, match="is a link"), study.writing():
        pass
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.usefixtures("bare")
def test_memory_without_sysconf() -> None:
    assert memory.available_bytes(torch.device("cpu")) == memory.UNKNOWN


@pytest.mark.usefixtures("bare")
def test_a_basis_in_a_file_without_fallocate(tmp_path: Path) -> None:
    rows = basis._in_file(tmp_path, 3, 5, torch.float64, 120)
    assert rows.shape == (3, 5)
    assert not rows.any()
    A = torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))
    assert cl.eigs(A, 1, store=str(tmp_path)).values.tolist() == pytest.approx([12.0])


def test_nothing_of_posix_is_imported() -> None:
    """By the parts that store, read and write."""
    code = (
        "import sys\nfor name in ('fcntl', 'resource', 'pwd', 'grp', 'termios'): sys.modules.pop(name, None)\n"
        "import curvlens.study, curvlens.files, curvlens.memory\n"
        "from pathlib import Path\n"
        "for module in list(sys.modules.values()):\n"
        "    if module.__name__.startswith('curvlens'):\n"
        "        assert not {'fcntl', 'resource', 'pwd', 'grp', 'termios'} & set(vars(module)), module\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
