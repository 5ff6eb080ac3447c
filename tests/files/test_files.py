"""Files: what others put there is read within bounds or refused, and never written over."""

from __future__ import annotations

import ast
import copy
import gzip
import os
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import curvlens as cl
import hostile
from curvlens import files
from curvlens.cli import app
from curvlens.errors import printable
from curvlens.files.seal import sealed
from curvlens.results import ByBlock
from curvlens.study import Record, Study, table
from curvlens.study.rows import HEADS

FIX = "Move it away."
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415478da63f8ffff3f0005fe02fea72d"
    "2b9b0000000049454e44ae426082"
)
CONTENTS = {
    ".html": b"<!doctype html>\n<p>curvlens</p>\n",
    ".md": b"# Verdicts\n",
    ".svg": b'<?xml version="1.0"?>\n<svg></svg>\n',
    ".json": b'{\n "a": 1\n}\n',
    ".jsonl": HEADS[2].encode(),
    ".csv": b"path,trace,\nh.0,1.5,\n",
    ".png": PNG,
}
EVIL = "\x1b[31mred\u202eback\u200bzero\u3164\ttab\x9b"
A = torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))


def record(sigma: float) -> Record:
    return Record("fig3a", 1, {"sigma": sigma, "seed": 0}, {"norm": [1 / 3, {"a": 2}]}, 1.5)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


# Writing


@pytest.mark.parametrize("kind", CONTENTS)
def test_only_what_we_wrote_and_nobody_changed_is_written_over(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"file{kind}"
    files.write(file, CONTENTS[kind], seal=kind, fix=FIX)
    files.write(file, CONTENTS[kind], seal=kind, fix=FIX)
    ours = file.read_bytes()
    for at in range(0, len(ours), 7):
        edited = ours[:at] + b"~" + ours[at:]
        file.write_bytes(edited)
        with pytest.raises(cl.CurvlensError, match=rf"not overwritten\. {FIX}"):
            files.write(file, CONTENTS[kind], seal=kind, fix=FIX)
        assert file.read_bytes() == edited
    file.write_bytes(ours + b"\n")
    with pytest.raises(cl.CurvlensError, match="was changed since curvlens wrote it"):
        files.write(file, CONTENTS[kind], seal=kind, fix=FIX)
    file.write_bytes(b"my notes on curvlens, written by curvlens sha256\n" + CONTENTS[kind])
    with pytest.raises(cl.CurvlensError, match="was not written by curvlens"):
        files.write(file, CONTENTS[kind], seal=kind, fix=FIX)


def test_readers_read_what_has_a_seal(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert image.imread(files.write(tmp_path / "a.png", PNG, seal=".png", fix=FIX)).shape == (1, 1, 3)
    rows = files.write(tmp_path / "a.csv", CONTENTS[".csv"], seal=".csv", fix=FIX).read_text().splitlines()
    assert [row.split(",")[:2] for row in rows] == [["path", "trace"], ["h.0", "1.5"]]
    assert (
        files.parse(files.write(tmp_path / "a.json", CONTENTS[".json"], seal=".json", fix=FIX).read_bytes())["a"] == 1
    )
    (tmp_path / "table.jsonl.gz").write_bytes(gzip.compress(sealed(".jsonl", table({"": record(0.1)}).encode())))
    assert len(Study(tmp_path).records("fig3a")) == 1


def test_notes_that_name_curvlens_are_not_written_over(tmp_path: Path) -> None:
    notes = tmp_path / "quick-2-seeds" / "verdicts.md"
    notes.parent.mkdir()
    notes.write_text("# My notes on curvlens\n")
    told = run("reproduce", "fig8", "--quick", "--seeds", 2, "--results", tmp_path)
    assert told.exit_code == 1
    assert "was not written by curvlens" in " ".join(told.output.split())
    assert notes.read_text() == "# My notes on curvlens\n"


def _writes(call: ast.Call) -> bool:
    """Whether a call writes a file by itself."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    # A scratch file, as mkstemp makes it for vectors that memory has no room for, is nothing that is kept.
    if name in ("write_text", "write_bytes", "to_csv", "savetxt", "save_file", "fdopen"):
        return not (name == "fdopen" and any(isinstance(a, ast.Constant) and a.value == "rb" for a in call.args))
    texts = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    return name == "open" and any(isinstance(t, str) and set(t) & set("wax+") and len(t) <= 3 for t in texts)


def test_only_one_place_writes_files() -> None:
    """And the store, which adds lines to its files."""
    source = Path(files.__file__).parent.parent
    found = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _writes(node)
    }
    assert "files/writing.py" in found
    assert {name for name in found if not name.startswith(("files/", "study/"))} <= {"papers/store.py"}


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ('open(p, "w")', True),
        ('p.open("ab")', True),
        ('open(p, mode="x")', True),
        ('p.write_text("x")', True),
        ("frame.to_csv(p)", True),
        ("open(p)", False),
        ('p.open("rb")', False),
        ('os.fdopen(handle, "rb")', False),
    ],
)
def test_the_search_for_writers_finds_them(line: str, writes: bool) -> None:
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert _writes(call) is writes


def test_a_link_at_a_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 16)
    planted = tmp_path / ".curvlens-0000000000000000.new"
    planted.symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "result", b"new")
    planted.unlink()
    planted.symlink_to(tmp_path / "not there")
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "result", b"new")
    assert precious.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == [planted.name, "precious"]


def test_permissions_are_those_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = cl.trace(A, 8).save(tmp_path / "result")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


# Reading


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return [cl.trace(A, 4), cl.diagonal(A, 4), cl.eigs(A, 2), ByBlock({"a": cl.trace(A, 4)})]


@pytest.mark.parametrize("seed", range(8))
def test_hostile_results_are_loaded_or_refused(seed: int, tmp_path: Path, results: list[Any]) -> None:
    """Nothing else happens: no other error, no waiting, no memory taken for what the file does not have."""
    for number in range(25):
        folder = tmp_path / str(number)
        rng = random.Random(1000 * seed + number)
        text = rng.choice(results).save(folder / "result")
        tensors = sorted(folder.glob("*.safetensors"))
        hostile.spoil(rng.choice([text, *tensors]), rng)
        if all(file.is_file() and file.stat().st_size < 1 << 20 for file in (text, *tensors)):
            hostile.believed(text, *tensors)
        with suppress(cl.CurvlensError):
            repr(cl.load(folder / "result"))
        shutil.rmtree(folder)


@pytest.mark.parametrize("digits", [30, 400, 5000])
def test_numbers_that_no_float_holds(digits: int, tmp_path: Path) -> None:
    path = cl.trace(A, 4).save(tmp_path / "trace")
    path.write_text(path.read_text().replace('"$scalar": ', f'"$scalar": {"7" * digits}, "was": ', 1))
    with pytest.raises(cl.CurvlensError, match=f"a whole number has {digits} digits"):
        cl.load(path)


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "huge.json").touch()
    os.truncate(tmp_path / "huge.json", 1 << 40)
    (tmp_path / "folder.json").mkdir()
    for name, message in (
        ("pipe", "is a named pipe, expected a regular file"),
        ("endless", "is a device"),
        ("huge", "has 1 TiB, at most 64 MiB are read"),
        ("folder", "is a folder"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            cl.load(tmp_path / name)
    text = tmp_path / "text.txt"
    os.mkfifo(text)
    assert "is a named pipe" in run("doctor", "gpt2", "--data", text).output


# Names


def test_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    shown = printable(EVIL)
    assert shown.isascii()
    assert shown.isprintable()
    model = nn.Sequential()
    model.add_module(f"[bold]{EVIL}", nn.Linear(2, 2))
    model.add_module("drop", nn.Dropout(0.1))
    x = torch.ones(3, 2, dtype=torch.float64)
    problem = cl.Problem(model.double().eval(), (x, x), cl.losses.MSE())
    G = cl.ggn(problem)
    low = copy.deepcopy(model).half()
    half = cl.doctor(low, (x.half(), x.half()), cl.losses.MSE())
    with pytest.raises(cl.CurvlensError) as error:
        G[f"{EVIL}.wieght"]
    texts = [str(problem.blocks), repr(cl.trace(G, 4, by="block")), str(half), str(error.value), repr(G[G.rows.names])]
    texts.append(repr(cl.trace(G, 4, by="block").save(tmp_path / "blocks") and cl.load(tmp_path / "blocks")))
    script = tmp_path / "evil.py"
    script.write_text(f"from torch import nn\nmodel = nn.Sequential()\nmodel.add_module({EVIL!r}, nn.Linear(2, 2))\n")
    told = run("blocks", f"{script}:model")
    assert told.exit_code == 0, told.output
    for text in (*texts, told.output):
        assert not set(text) & set("\x1b\u202e\u200b\u3164\t\x9b")
    assert "\\x1b[31mred\\u202eback" in texts[0]
    assert "\\x1b[31mred\\u202eback" in told.output


# Own code


def test_own_code_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it_model.py").write_text("from torch import nn\nmake = lambda: nn.Linear(2, 2).double()\n")
    (tmp_path / "beside_it_late.py").write_text("number = 1.0\n")
    (tmp_path / "random.py").write_text(
        "import beside_it_model, torch, curvlens as cl\nfrom torch import nn\n\n"
        "class Late(nn.Module):\n    def forward(self, x):\n        import beside_it_late\n"
        "        return x * beside_it_late.number\n\n"
        "def make_problem():\n    x = torch.ones(1, 2).double()\n"
        "    return nn.Sequential(beside_it_model.make(), Late()), (x, x), cl.losses.MSE()\n"
    )
    path = sys.path[:]
    told = run("doctor", f"{tmp_path}/random.py:make_problem")
    assert told.exit_code == 0, told.output
    assert sys.path == path
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("", ":make_problem", "':make_problem' lacks a file. Expected file.py:name"),
        ("", "{file}:", "lacks a name"),
        ("", "a b:make", "is no name of a module"),
        ("", "..up:make", "is no name of a module"),
        ("import sys\nsys.exit(0)", "{file}:make", "ended the program: line 2: sys.exit(0)."),
        ("def make():\n    raise SystemExit", "{file}:make", "ended the program: line 2: sys.exit(None)."),
        ("import no_such_module_anywhere", "{file}:make", "raised ModuleNotFoundError: line 1"),
        ("x = '\0'", "{file}:make", "raised"),
    ],
)
def test_own_code_that_gives_nothing(code: str, target: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    told = run("doctor", target.replace("{file}", str(file)))
    assert told.exit_code == 1
    assert message in " ".join(told.output.split())
    assert isinstance(told.exception, SystemExit)


def test_a_forward_pass_that_ends_the_program_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text(
        "import torch, curvlens as cl\nfrom torch import nn\nclass Quits(nn.Linear):\n"
        "    def forward(self, x):\n        raise SystemExit(0)\n"
        "def make():\n    x = torch.ones(1, 2)\n    return Quits(2, 2), (x, x), cl.losses.MSE()\n"
    )
    told = run("profile", f"{tmp_path}/quits.py:make")
    assert told.exit_code == 1
    assert "ended the program: sys.exit(0)" in told.output


def test_the_version() -> None:
    told = run("--version")
    assert told.exit_code == 0
    assert told.output == f"curvlens {cl.__version__}\n"
