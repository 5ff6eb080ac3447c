"""``curvlens profile`` and its chart, as a user meets them."""

from __future__ import annotations

import csv
import errno
import html
import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import curvlens as cl
import small
from curvlens import report
from curvlens.cli import app
from curvlens.cli.code import from_code
from curvlens.report.terminal.profile import footer
from curvlens.report.terminal.tree import View, lines
from curvlens.results import Estimate, Portion, Profile, Row

SCRIPT = """
import torch
from torch import nn
import curvlens as cl
import small

class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g

class Square(nn.Module):
    def forward(self, x):
        return Once.apply(x)

def make():
    return small.problem()

def parts():
    return small.gpt(), small.tokens_and_labels(), cl.losses.CrossEntropy()

def gaps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Square(), nn.Linear(3, 3)).double()
    return model, (torch.randn(4, 3).double(), torch.randn(4, 3).double()), cl.losses.MSE()

def sick():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    return model, (torch.randn(4, 3).double(), torch.randn(4, 3).double()), cl.losses.MSE()

def broken():
    return 1 / 0

number = 5
"""
HOSTILE = [
    "<script>alert(1)</script>",
    "\"'&amp;</td>",
    "x" * 200,
    "жук漢字🙂",
    "\x1b[31mred",
    "\u202eback",
    "{{x}} ${y}",
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: object, width: int = 200) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": str(width)})


def tree_of(result: Result) -> list[str]:
    """The names in the tree, in their order."""
    return re.findall(r"^[│ ]*[├└]─ (\S+)", result.output, re.MULTILINE)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return cl.profile(small.problem(), samples=4)


def row(path: str, value: float, error: float = 0.1, kind: str = "Module") -> Row:
    return Row(path, kind, portion(value, error), portion(value, error))


def portion(value: float, error: float = 0.1) -> Portion:
    x = Estimate(torch.tensor(value), torch.tensor(error), 4, dof=3)
    size = Estimate(torch.tensor(abs(value)), torch.tensor(error), 4, dof=3)
    return Portion(trace=x, frobenius=size, share=x, top=x)


def made(paths: list[str]) -> Profile:
    rows = {path: row(path, (-1) ** i * 1.0) for i, path in enumerate(["", *paths])}
    return Profile(portion(1.0), portion(0.5), rows, mismatch=1e-15, samples=4)


# In the terminal


def test_the_tree(script: Path) -> None:
    result = run(f"{script}:make", "--samples", 4, width=60)  # a pipe has no width
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    first, _, heading, *_ = result.stdout.splitlines()
    assert first == f"Curvature of GPT, {small.problem().layout.size} parameters, 15 tokens, float64, 4 probes"
    assert re.sub(r"\s+", " ", heading).strip() == "trace share, % Frobenius norm of λ_max"
    names = tree_of(result)
    assert names[:4] == ["GGN", "functional", "h", "0"]
    assert names[-2:] == ["final_norm", "unembed"]
    assert "embed" not in names
    assert "1 row that is zero not shown (--all)" in result.output
    assert re.search(r"✓ rows add up to zᵀHz within \de-1\d of the sum of their sizes", result.output)
    assert re.search(r"softmax +-?\d\S* ± \S+ +-?\d\S* ± \S+ .*\d\S* ± \S+", result.output)


def test_what_is_shown_of_it(script: Path) -> None:
    shallow = run(f"{script}:parts", "--samples", 4, "--depth", 1, "--all", "--no-top")
    assert tree_of(shallow) == ["GGN", "functional", "embed", "h", "final_norm", "unembed"]
    assert "not shown (--depth)" in shallow.output
    assert "λ_max  " not in shallow.output
    own = run(f"{script}:make", "--samples", 4, "--depth", 1, "--sort", "trace", "--own", "--no-top")
    assert tree_of(own)[2:] == ["unembed", "final_norm", "h"]
    assert "own code" in own.output


@pytest.mark.parametrize("column", ["trace", "share", "frobenius", "top"])
@pytest.mark.parametrize("own", [True, False])
def test_siblings_are_sorted_by_size(profile: Profile, column: Any, own: bool) -> None:
    shown = lines(profile, View(depth=1, sort=column, own=own)).shown[3:]
    sizes = [abs(float(getattr(line.portion, column))) for line in shown]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert [line.guide for line in shown] == ["   ├─ ", "   ├─ ", "   └─ "]


def test_spectral_norms(script: Path) -> None:
    result = run(f"{script}:make", "--samples", 4, "--no-top", "--spectral", "unembed", "--spectral", "h.0.mlp")
    assert result.exit_code == 0, result.output
    assert "‖·‖₂" in result.output
    lines = [line for line in result.output.splitlines() if re.search(r"unembed|mlp", line)]
    assert all(line.rstrip().endswith(tuple("0123456789")) for line in lines)
    hidden = run(f"{script}:make", "--samples", 4, "--no-top", "--spectral", "h.0.mlp", "--depth", 1)
    assert re.search(r"‖M‖₂ of h\.0\.mlp, with all that is in it: \d", hidden.output)
    assert "‖·‖₂" not in hidden.output
    own = run(f"{script}:make", "--samples", 4, "--no-top", "--spectral", "h.0.mlp", "--own")
    assert "‖M‖₂ of h.0.mlp, with all that is in it" in own.output


@pytest.mark.parametrize("column", ["order", "share"])
def test_what_is_in_a_module_adds_up_to_it(profile: Profile, column: Any) -> None:
    """Its own code has a line, in the terminal and in print(profile)."""
    shown = lines(profile, View(sort=column)).shown
    at = next(i for i, line in enumerate(shown) if line.name == "mlp")
    inner = [line for line in shown[at + 1 :] if line.guide.startswith("   │     ")][:3]
    assert sorted(line.name for line in inner) == ["(own code)", "down", "up"]
    assert abs(sum(float(line.portion.trace) for line in inner) - float(shown[at].portion.trace)) < 1e-12
    assert sum(line.name == "(own code)" for line in shown) == 1
    assert str(profile).count("(own code)") == 1
    assert "(own code)" not in [line.name for line in lines(profile, View(own=True)).shown]


def test_the_text_of_a_profile(profile: Profile) -> None:
    first, heading, *rows, last = str(profile).splitlines()
    assert first == profile.headline
    assert heading.split() == ["trace", "share,", "%", "Frobenius", "norm", "of", "λ_max"]
    assert last == profile.check
    assert re.search(r"^  GGN +\S+ ± \S+ +\S+ ± \S+ +\S+ ± \S+ +\S+$", rows[1])
    assert len(rows) == len(profile) + 3  # Hessian, GGN, and the own code of the feed-forward layer


def test_the_documentation_shows_what_is_printed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page, readme = (root / name for name in ("docs/howto/profile.md", "docs/tutorials/tour.md"))
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = next(text for kind, text in fences if kind == "python").partition("\n\nproblem =")[0]
    tree = next(text for kind, text in fences if kind == "text" and "Hessian" in text)
    script = tmp_path / "train.py"
    script.write_text(code)
    printed = str(cl.profile(from_code(f"{script}:make_problem"), samples=32)).splitlines()
    told = run(f"{script}:make_problem", "--depth", 2, "--samples", 32).output
    shown = re.search(
        r"^```text\n( +trace +share.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert shown is not None

    def but_rounding(lines: list[str]) -> list[str]:
        return [re.sub(r"within \S+", "", line.rstrip()) for line in lines if line.strip() != "…"]

    assert set(but_rounding(tree.splitlines())) <= set(but_rounding(printed))
    assert set(but_rounding(shown[1].splitlines())) <= set(but_rounding(told.splitlines()))


def test_records(profile: Profile) -> None:
    records = profile.table()
    assert [r["path"] for r in records] == ["Hessian", "GGN", *profile.rows]
    assert len({tuple(r) for r in records}) == 1
    mlp = records[2 + list(profile.rows).index("h.0.mlp")]
    assert mlp["total_share"] == float(profile["h.0.mlp"].total.share)
    assert mlp["total_share_error"] == float(profile["h.0.mlp"].total.share.stderr)
    assert mlp["total_spectral"] is None


def test_as_a_module() -> None:
    told = subprocess.run([sys.executable, "-m", "curvlens", "--help"], capture_output=True, text=True, check=True)
    assert "profile" in told.stdout


def test_bounds_of_the_largest_eigenvalue_are_told_where_they_are_seen(profile: Profile) -> None:
    def said(shown: Profile) -> str:
        return " ".join(str(text) for text in footer(shown, lines(shown, View()), View()))

    assert "bounds" not in said(profile)
    assert profile.hessian.top is not None
    loose = replace(profile.hessian.top, stderr=0.1 * profile.hessian.top.value)
    assert "for λ_max bounds" in said(replace(profile, hessian=replace(profile.hessian, top=loose)))


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def silent(self: Any, name: str, **options: Any) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.HfApi, "model_info", silent)
    text = tmp_path / "text.txt"
    text.write_text("one two")
    result = run("nosuch/model-of-nobody", "--data", text)
    assert result.exit_code == 1
    assert "no copy on this machine" in " ".join(result.output.split())
    assert asked == ["nosuch/model-of-nobody"]
    assert "Retry" not in caplog.text


def test_files_and_the_way_back(script: Path, tmp_path: Path, profile: Profile) -> None:
    out, page, table = tmp_path / "p", tmp_path / "p.html", tmp_path / "p.csv"
    for _ in range(2):  # the second time over its own
        result = run(f"{script}:make", "--samples", 4, "--out", out, "--html", page, "--csv", table)
        assert result.exit_code == 0, result.output
    again = cl.load(out)
    assert str(again) == str(profile)
    with table.open() as lines:
        records = list(csv.DictReader(lines))
    assert [r["path"] for r in records] == [str(r["path"]) for r in profile.table()]
    assert float(records[-1]["own_trace"]) == float(profile["unembed"].own.trace)
    text = out.with_suffix(".json").read_text()
    damaged = tmp_path / "damaged.json"
    damaged.write_text(text.replace('"samples": ', '"samples": "many", "old": ', 1))
    with pytest.raises(cl.CurvlensError, match="samples is 'many', expected int"):
        cl.load(damaged)
    seal, _, chart = page.read_text(encoding="utf-8").partition("\n")
    assert seal.startswith("<!-- written by curvlens sha256 ")
    assert chart == report.icicle(again)
    assert f"written: {out}.json" in result.output


def _gaps(script: Path) -> Any:
    return from_code(f"{script}:gaps")


def test_gaps(script: Path, tmp_path: Path) -> None:
    page = tmp_path / "gaps.html"
    result = run(f"{script}:gaps", "--samples", 4, "--sort", "trace", "--html", page)
    assert result.exit_code == 0, result.output
    assert "not known" in result.output
    assert "nan" not in result.output
    with pytest.warns(cl.CurvlensWarning, match="gaps"):
        gaps = cl.profile(cl.Problem(*_gaps(script)), samples=4)
    assert "not known" in str(gaps)
    assert "nan" not in str(gaps)
    assert "not known" in repr(gaps)
    assert gaps.table()[0]["total_trace"] is None
    assert "note: not twice differentiable: '2'" in result.output
    assert "✗ whether the rows add up to zᵀHz is not known" in result.output
    assert result.output.count("not twice differentiable") == 1
    assert tree_of(result)[2:] == ["1", "2", "3", "(own"]  # what is known comes first
    text = page.read_text(encoding="utf-8")
    assert "not known" in text
    assert "NaN" not in text
    assert '"quantity":"trace"' in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{script}:number",), 1, "expected a curvlens.Problem"),
        (("{script}:maek",), 1, "Did you mean 'make'"),
        (("{script}:broken",), 1, "broken raised ZeroDivisionError: line"),
        (("nothing.py:make",), 1, "There is no file 'nothing.py'"),
        (("gpt2",), 1, "--data"),
        (("{script}:sick",), 1, "model.eval()"),
        (("{script}:make", "--dtype", "float64"), 1, "write model.double() yourself"),
        (("{script}:make", "--spectral", "h.0.atn"), 1, "Did you mean 'h.0.attn'"),
        (("{script}:make", "--sort", "top", "--no-top"), 1, "--no-top leaves out"),
        (("{script}:make", "--out", "{folder}/other"), 1, "not overwritten"),
        (("{script}:make", "--html", "{folder}/other.json"), 1, "was not written by curvlens"),
        (("{script}:make", "--html", "{folder}"), 1, "is a folder"),
        (("{script}:make", "--html", "{folder}/no/p.html"), 1, "/no'. Make it first."),
        (("{script}:make", "--out", "{folder}/no/p"), 1, "/no'. Make it first."),
        (("{script}:make", "--csv", "{script}/p.csv"), 1, "there is no folder"),
        (("{script}:make", "--csv", "{folder}/other.json"), 1, "was not written by curvlens"),
        (("{script}:make", "--out", "{folder}/closed/p"), 1, "cannot be written: Permission denied"),
        (("{script}:make", "--html", "{folder}/closed/p.html"), 1, "cannot be written: Permission denied"),
        (("{script}:make", "--data", "x"), 1, "--data is for Hugging Face models"),
        (("{script}:make", "--tokens", "8"), 1, "--tokens is for Hugging Face models"),
        (("{script}:make", "--sequences", "8"), 1, "--sequences is for Hugging Face models"),
        (("{script}:make", "--out", "{folder}/a", "--html", "{folder}/a.json"), 1, "--out and --html both name"),
        (("{script}:make", "--sort", "size"), 2, "'frobenius'"),
        (("{script}:make", "--samples", "3"), 2, "--samples"),
    ],
)
def test_what_has_to_be_mended(
    script: Path, arguments: tuple[str, ...], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    closed = script.with_name("closed")
    closed.mkdir()
    temporary = tempfile.TemporaryFile

    def refused(dir: Path) -> Any:
        if dir == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return temporary(dir=dir)

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    other = script.with_name("other.json")
    other.write_text('{"mine": 1}')
    given = [a.replace("{script}", str(script)).replace("{folder}", str(script.parent)) for a in arguments]
    result = run(*given)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert other.read_text() == '{"mine": 1}'


# The chart


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    (data,) = json.loads(found[1])["icicles"]
    assert isinstance(data, dict)
    return data


def test_the_page_has_all_and_fetches_nothing(profile: Profile) -> None:
    page = report.icicle(profile)
    assert not re.search("https?:", page)
    assert not re.search(r"\bsrc=|@import|url\(", page)
    assert all(f"<th>{html.escape(r.path or 'functional')}</th>" in page for r in profile)
    assert profile.check in page
    assert "float64" in page
    rows = data_of(page)["rows"]
    assert [r["path"] for r in rows] == [r.path for r in profile]
    for r in rows[1:]:
        assert profile.depth(r["path"]) == 1 + profile.depth(rows[r["parent"]]["path"])
    share = profile["h.0.mlp"].total.share
    assert data_of(page)["rows"][list(profile.rows).index("h.0.mlp")]["total"]["share"][0] == float(share)


def test_hostile_names() -> None:
    model = nn.Sequential()
    for name in HOSTILE:
        model.add_module(name, nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    torch.manual_seed(0)
    x = torch.randn(3, 2, dtype=torch.float64)
    profile = cl.profile(cl.Problem(model.double(), (x, x), cl.losses.MSE()), samples=4, top=False)
    page = report.icicle(profile)
    assert "<script>alert" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "\x1b" not in page
    assert "\u202e" not in page
    for name in HOSTILE[:4]:
        shown = re.escape(f"{html.escape(name)}.1")
        assert re.search(rf'<th>(<span class="clip" title="{shown}">)?{shown}<', page)
        assert any(r["name"] == name for r in data_of(page)["rows"])


def test_a_terminal_is_not_told_what_to_do_by_a_name(tmp_path: Path) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(
        "import torch, curvlens as cl\nfrom torch import nn\nmodel = nn.Sequential()\n"
        f"for name in {HOSTILE!r}:\n    model.add_module(name, nn.Tanh())\n"
        "x = torch.ones(1, 2).double()\nmodel = nn.Sequential(nn.Linear(2, 2), model).double()\n"
        "problem = model, (x, x), cl.losses.MSE()\n"
    )
    result = run(f"{script}:problem", "--samples", 4, "--all")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\\x1b[31mred" in result.output


@pytest.mark.parametrize("count", [0, 2000])
def test_few_and_many_rows(count: int) -> None:
    profile = made([f"h.{i}" for i in range(count)])
    page = report.icicle(profile, "trace")
    assert len(data_of(page)["rows"]) == count + 1
    assert page.count("<tr>") == count + 4


@pytest.mark.parametrize("quantity", ["share", "trace", "top", "frobenius"])
def test_quantities(profile: Profile, quantity: str) -> None:
    data = data_of(report.icicle(profile, quantity))
    assert data["quantity"] == quantity
    texts = [row["total"][quantity][1] for row in data["rows"]]
    assert not any("-" in text for text in texts)  # one minus sign on the page


def test_what_cannot_be_drawn(profile: Profile) -> None:
    with pytest.raises(cl.CurvlensError, match="quantity='size', expected one of 'share', 'trace'"):
        report.icicle(profile, "size")
    bare = replace(profile, hessian=replace(profile.hessian, top=None))
    with pytest.raises(cl.CurvlensError, match="top=True"):
        report.icicle(bare, "top")
    with pytest.raises(cl.CurvlensError, match="Expected a profile"):
        report.icicle(5)  # type: ignore[arg-type]


def test_a_sum_that_is_off_is_red(profile: Profile) -> None:
    bad = replace(profile, mismatch=1e-3)
    assert not bad.adds_up
    assert 'class="bad">✗ rows do not add up to zᵀHz: off by 0.001 of' in report.icicle(bad)
    assert not replace(profile, mismatch=math.nan).adds_up


def test_what_it_takes_is_told_where_there_is_no_terminal(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["curvlens.cli.profile"], "EVERY", 0.0)  # the package has a command of that name
    found = CliRunner().invoke(app, ["profile", f"{script}:make", "--samples", "4", "--memory", "1GB"])
    assert found.exit_code == 0
    told = found.stderr.splitlines()
    assert re.match(r"4 probes, [\d,]+ parameters, .* about \d+ s, .*; memory up to [\d.]+ \w+$", told[0])
    assert any(re.match(r"0 of 4 probes, \d+ s of about", line) for line in told)
    assert any(line.startswith("largest eigenvalue") for line in told)
    small = CliRunner().invoke(app, ["profile", f"{script}:make", "--memory", "1kB"])
    assert small.exit_code == 1
    assert "Raise memory=" in " ".join(small.output.split())


def test_a_reader_that_has_enough_is_no_error_of_the_code(tmp_path: Path) -> None:
    """`curvlens profile … | head -1` once said that the user's code had ended the program."""
    code = tmp_path / "own.py"
    code.write_text(
        "import torch, curvlens as cl\n"
        "def make():\n"
        "    x, y = torch.ones(3, 2).double(), torch.zeros(3, 1).double()\n"
        "    return cl.Problem(torch.nn.Linear(2, 1).double(), (x, y), cl.losses.MSE())\n"
    )
    command = [sys.executable, "-m", "curvlens", "profile", f"{code}:make", "--samples", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    process.wait()
    assert "ended the program" not in told
    assert "Traceback" not in told


def test_a_name_that_a_file_lacks(tmp_path: Path) -> None:
    """What can be named as it is comes first: no classes, and no functions with arguments."""
    parts = [f"class A{i}:\n    pass\n\ndef a{i}(x):\n    return x\n" for i in range(10)]
    (tmp_path / "mine.py").write_text("\n".join([*parts, "def z_problem():\n    return None\n"]))
    with pytest.raises(cl.CurvlensError, match="Known names: 'z_problem'"):
        from_code(f"{tmp_path / 'mine.py'}:qqqq")
