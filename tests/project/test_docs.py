"""Documentation runs, and says what is so; the sources keep to the derivatives that the documentation promises."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import curvlens as cl

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Python blocks of the pages


def pages() -> list[Path]:
    readme = ROOT / "README.md"
    return [*([readme] if readme.exists() else []), *sorted(DOCS.rglob("*.md"))]


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The ```python blocks of a page, each with the number of its first line."""
    fence = re.compile(r"^(?P<fence>`{3,})python[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
    for match in fence.finditer(text):
        yield text.count("\n", 0, match.start("code")) + 1, match["code"]


def run_page(page: Path) -> int:
    """Run the blocks of a page top to bottom in one namespace; how many there were."""
    module = ModuleType("page")  # a module of its own, so that classes of the page know where they live
    count = 0
    for line, code in blocks(page.read_text(encoding="utf-8")):
        count += 1
        # Blank lines in front: a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), module.__dict__)
    return count


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page: Path) -> None:
    run_page(page)


def test_pages_have_code() -> None:
    for name in (
        "index",
        "tutorials/own-gpt",
        "tutorials/hugging-face",
        "tutorials/check-a-formula",
        "tutorials/tour",
        "howto/problem",
        "howto/losses",
        "howto/operators",
        "howto/blocks",
        "howto/spectra",
        "howto/profile",
        "howto/compare",
        "howto/depth",
        "howto/pictures",
        "howto/doctor",
        "howto/precondition",
        "howto/large-models",
        "howto/coming-from",
        "howto/layernorm-rows",
        "howto/precision",
        "howto/attention",
        "howto/reproduce",
        "explanation/attention-hessian",
        "explanation/claims",
        "explanation/math",
        "reference/errors",
    ):
        assert list(blocks((DOCS / f"{name}.md").read_text(encoding="utf-8"))), f"docs/{name}.md shows no code"


def test_readme_exists() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_a_broken_block_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\n```text\nno code\n```\n\n````python\nassert a == 2\n````\n")
    assert [line for line, _ in blocks(page.read_text())] == [2, 10]
    with pytest.raises(AssertionError) as caught:
        run_page(page)
    assert caught.traceback[-1].lineno == 9  # counted from 0: line 10 of the page


# Examples


def test_examples_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    heatmap = importlib.import_module("attention_heatmap")
    H = heatmap.hessian(width=4, samples=3)
    assert H.norm("Q") < H.norm("V")
    heatmap.draw(H, str(tmp_path / "map.png"))
    assert (tmp_path / "map.png").stat().st_size > 5000


@pytest.mark.full
def test_examples_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    norms = importlib.import_module("pre_or_post_norm")
    found = {norm: norms.measured(norm, layers=1, width=4, sequences=2, samples=4) for norm in ("pre", "post")}
    assert all(profile.adds_up for profile, _, _ in found.values())
    assert "pre-LN: matrix 6 of 6" in capsys.readouterr().err
    norms.report("post", found["post"])
    told = capsys.readouterr().out
    share = found["post"][0]["h.0"].total.share
    assert f"  h.0  {share!s:>15}  s = 1.000" in told  # a norm stands behind each layer
    assert "λ_max 1.0 times, ‖M‖₂ 1.0 times" in told  # the first layer is the last
    norms.draw(found, str(tmp_path / "norms.png"))
    assert (tmp_path / "norms.png").stat().st_size > 5000
    memory = importlib.import_module("attention_memory")
    memory.main([str(tmp_path / "memory.png"), "--longest", "1024"])
    assert "torch, SDPBackend.MATH, 1024 tokens" in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 5000


# Doctests of the sources


def modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages(cl.__path__, "curvlens.")]
    return ["curvlens", *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    public = {key: getattr(cl, key) for key in cl.__all__} | {key: getattr(cl.losses, key) for key in cl.losses.__all__}
    public |= {"torch": torch, "nn": nn, "cl": cl}
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    for case in finder.find(module, name, globs={**public, **vars(module)}):
        runner.run(case)
    assert not runner.summarize(verbose=False).failed


# What the pages say


def test_headings_that_docstrings_cite() -> None:
    text = (DOCS / "explanation" / "math.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    cited = {
        heading
        for file in (ROOT / "src").rglob("*.py")
        for heading in re.findall(r"`docs/explanation/math\.md`,\s+\"([^\"]+)\"", file.read_text(encoding="utf-8"))
    }
    assert {"Losses", "Products"} <= cited
    assert cited <= headings


def messages() -> list[str]:
    """All texts of the sources, with {} where a value goes."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_errors_page_quotes_real_messages() -> None:
    headings = re.findall(r"^### (.+)$", (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [quote for heading in headings for quote in re.findall(r'"([^"]+)"', heading)]
    assert len(quoted) >= 30
    known = messages()
    assert not [quote for quote in quoted if not any(quote in text for text in known)]


def reference() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))


def test_the_reference_has_every_public_name() -> None:
    words = set(re.findall(r"\bcl(?:\.\w+)+", reference()))
    assert not [name for name in cl.__all__ if f"cl.{name}" not in words]


def test_the_index_of_the_reference_has_a_line_for_every_public_name() -> None:
    rows = re.findall(r"^\| `cl\.(\w+)` \| .+ \| \[", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(cl.__all__)


def test_the_reference_has_every_name_of_a_public_package() -> None:
    text = reference()
    packages = [name for name in cl.__all__ if hasattr(getattr(cl, name), "__path__")]
    assert {"calculus", "losses", "operators"} <= set(packages)
    names = [f"cl.{package}.{name}" for package in packages for name in getattr(cl, package).__all__]
    missing = [name for name in names if not re.search(rf"^##+ {re.escape(name)}$", text, re.MULTILINE)]
    assert not missing, "add a heading and a ::: line to docs/reference"


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(https?:)?//", text)
        fetched += re.findall(
            r"<link\b[^>]*\brel=\"(?:stylesheet|preconnect|preload)\"[^>]*\bhref=\"(?:https?:)?//", text
        )
        assert not fetched, page.name


# Derivatives that are wrong through layer_norm in torch 2.13 (docs/explanation/math.md, "Why reverse over reverse")

NAMESPACES = ("torch.func.", "functorch.", "torch._functorch.eager_transforms.", "torch._functorch.apis.")
ALWAYS_WRONG = {"hessian", "jacfwd"}
WRONG_INSIDE = {
    "jvp": {"jacrev"},
    "vjp": {"jacrev", "jvp"},
    "jacrev": {"jacrev", "jvp"},
    "grad": {"jacrev", "jvp"},
    "grad_and_value": {"jacrev", "jvp"},
    "torch.autograd.grad": {"jacrev", "jvp"},
}
ALLOWED = {
    # The correctness table shows that these two are wrong.
    ("bench/methods.py", "jvp_jacrev", "jvp(jacrev)"),
    ("bench/methods.py", "grad_jvp.product", "grad(jvp)"),
    ("bench/assembly.py", "measure.by_torch", "hessian"),  # measured, and how far it is off
    ("bench/attention.py", "dense.by_torch", "hessian"),  # no layer_norm there: what users call, timed and compared
}

Definition = ast.expr | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass
class Scope:
    """What the names of a function (or of the module) stand for."""

    name: str
    outer: Scope | None = None
    imports: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[Definition]] = field(default_factory=dict)

    def find(self, name: str) -> Scope | None:
        scope: Scope | None = self
        while scope is not None and name not in scope.imports and name not in scope.values:
            scope = scope.outer
        return scope


def open_scope(node: ast.AST, outer: Scope | None) -> Scope:
    """The names that a module, function or lambda binds, not looking into the functions inside it."""
    above = outer.name if outer is not None else ""
    own: str = getattr(node, "name", "")  # a lambda goes by the name of its function
    scope = Scope(".".join(filter(None, (above, own))), outer)
    if isinstance(node, FUNCTIONS):
        a = node.args
        for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
            scope.values[arg.arg] = []
    body = node.body if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) else [node]
    todo: list[ast.AST] = list(body) if not isinstance(node, ast.Lambda) else [node.body]
    while todo:
        item = todo.pop()
        match item:
            case ast.Import():
                for alias in item.names:
                    scope.imports[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            case ast.ImportFrom():
                for alias in item.names:
                    scope.imports[alias.asname or alias.name] = f"{item.module}.{alias.name}"
            case ast.Assign():
                for target in item.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            scope.values.setdefault(name.id, []).append(item.value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                scope.values.setdefault(name, []).append(value)
            case ast.NamedExpr():
                scope.values.setdefault(item.target.id, []).append(item.value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.values.setdefault(item.name, []).append(item)
                todo += item.decorator_list
                continue
            case ast.Lambda():
                continue
            case _:
                pass
        todo += ast.iter_child_nodes(item)
    return scope


def transforms(expr: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
    """The transforms of torch that an expression may stand for, by aliases: {'jvp'} for ``tf.jvp``."""
    return {short(name) for name in dotted(expr, scope, depth)}


def short(name: str) -> str:
    return next((name.removeprefix(space) for space in NAMESPACES if name.startswith(space)), name)


def dotted(expr: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
    if depth > 8:
        return set()
    if isinstance(expr, ast.Attribute):
        return {f"{base}.{expr.attr}" for base in dotted(expr.value, scope, depth + 1)}
    if isinstance(expr, ast.Name) and (home := scope.find(expr.id)) is not None:
        if expr.id in home.imports:
            return {home.imports[expr.id]}
        values = [value for value in home.values[expr.id] if isinstance(value, (ast.Name, ast.Attribute))]
        return {name for value in values for name in dotted(value, home, depth + 1)}
    return set()


def mentioned(node: ast.AST, scope: Scope, seen: set[int]) -> set[str]:
    """All transforms that are named in a piece of code, or in what its names stand for."""
    if id(node) in seen:
        return set()
    seen.add(id(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
        return set()  # a value, through which nothing is differentiated
    inner = open_scope(node, scope) if isinstance(node, FUNCTIONS) else scope
    found: set[str] = set()
    if isinstance(node, (ast.Name, ast.Attribute)):
        found |= transforms(node, scope)
    if isinstance(node, ast.Name) and (home := scope.find(node.id)) is not None:
        for value in home.values.get(node.id, []):
            found |= mentioned(value, home, seen)
    for child in ast.iter_child_nodes(node):
        found |= mentioned(child, inner, seen)
    return found


def differentiated(call: ast.Call) -> ast.expr | None:
    """The first argument: the function, or for ``torch.autograd.grad`` the outputs."""
    named = [k.value for k in call.keywords if k.arg in ("func", "f", "outputs")]
    return call.args[0] if call.args else next(iter(named), None)


def wrong_derivatives(source: str) -> list[tuple[str, str]]:
    """(function, composition) for each composition of ``torch.func`` in a source that must not be used."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, scope: Scope) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            names = dotted(node, scope)
            found.extend(
                (scope.name, short(name)) for name in names if short(name) in ALWAYS_WRONG and short(name) != name
            )
        if isinstance(node, ast.Call):
            outers, inside = transforms(node.func, scope), differentiated(node)
            if outers & {"functools.partial"} and len(node.args) > 1:
                outers, inside = transforms(node.args[0], scope), node.args[1]
            for outer in sorted(outers & set(WRONG_INSIDE)):
                inner = mentioned(inside, scope, set()) if inside is not None else set()
                found.extend((scope.name, f"{outer}({name})") for name in sorted(inner & WRONG_INSIDE[outer]))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                for outer in sorted(transforms(decorator, scope) & set(WRONG_INSIDE)):
                    inner = set().union(*(mentioned(item, open_scope(node, scope), set()) for item in node.body))
                    found.extend((scope.name, f"{outer}({name})") for name in sorted(inner & WRONG_INSIDE[outer]))
        inner_scope = open_scope(node, scope) if isinstance(node, FUNCTIONS) else scope
        for child in ast.iter_child_nodes(node):
            visit(child, inner_scope)

    tree = ast.parse(source)
    visit(tree, open_scope(tree, None))
    return found


def sources() -> Sequence[Path]:
    return sorted(file for folder in ("src", "bench", "examples") for file in (ROOT / folder).rglob("*.py"))


def test_the_sources_use_no_wrong_derivative() -> None:
    found = {
        (file.relative_to(ROOT).as_posix(), *place)
        for file in sources()
        for place in wrong_derivatives(file.read_text(encoding="utf-8"))
    }
    assert not found - ALLOWED


BAD = {
    "jvp(jacrev)": "from torch.func import jvp, jacrev\njvp(jacrev(f), (x,), (v,))",
    "by a name": "from torch.func import jvp, jacrev\ndef h(x):\n    g = jacrev(f)\n    return jvp(g, (x,), (v,))",
    "by an alias": "import torch.func as tf\npush = tf.jvp\npush(lambda x: tf.jacrev(f)(x), (x,), (v,))",
    "renamed": "from torch.func import jvp as push, jacrev as rows\npush(rows(f), (x,), (v,))",
    "vjp(jacrev)": "import torch\n_, pull = torch.func.vjp(torch.func.jacrev(f), x)",
    "jacrev twice": "from torch import func\nfunc.jacrev(func.jacrev(f))",
    "grad(jvp)": "from torch.func import grad, jvp\ngrad(lambda x: jvp(f, (x,), (v,))[1])(x)",
    "grad of a function": (
        "from torch.func import grad, jvp\ndef slope(x):\n    _, t = jvp(f, (x,), (v,))\n    return t\ngrad(slope)"
    ),
    "decorated": "from torch.func import grad, jvp\n@grad\ndef slope(x):\n    return jvp(f, (x,), (v,))[1]",
    "partial": "from functools import partial\nfrom torch.func import grad, jvp\npartial(grad, partial(jvp, f))",
    "autograd over jvp": (
        "import torch\n_, t = torch.func.jvp(f, (x,), (v,))\ndef h():\n    return torch.autograd.grad(t, x)"
    ),
    "hessian": "import torch\ntorch.func.hessian(f)",
    "hessian imported": "from torch.func import hessian as second\nsecond(f)(x)",
    "jacfwd": "from functorch import jacfwd\njacfwd(f)",
    "inside a method": "import torch\nclass A:\n    def h(self):\n        return torch.func.hessian(self.f)",
}
GOOD = {
    "jvp(grad)": "from torch.func import grad, jvp\njvp(grad(f), (x,), (v,))",
    "vjp(grad)": "from torch.func import grad, vjp\nvjp(grad(f), x)",
    "reverse over reverse": "from torch.autograd import grad\ng = grad(y, x, create_graph=True)\ngrad(g, x, v)",
    "first order": "from torch.func import jvp, jacrev\njvp(f, (x,), (v,))\njacrev(f)",
    "our own hessian": "from curvlens import hessian\nhessian(problem)",
    "a point": "from torch.func import jvp, jacrev\nx = jacrev(f)(y)\njvp(h, (x,), (v,))",
    "a detached tangent": (
        "import torch\n_, t = torch.func.jvp(f, (x,), (v,))\ntorch.autograd.grad((y * t.detach()).sum(), x)"
    ),
    "another name": "from torch.func import grad, jvp\ndef a(jvp):\n    return grad(lambda x: jvp(x))",
    "words": '"""jvp(jacrev(f)) and torch.func.hessian are wrong."""',
}


@pytest.mark.parametrize("snippet", BAD.values(), ids=BAD)
def test_the_scanner_finds(snippet: str) -> None:
    assert wrong_derivatives(snippet)


@pytest.mark.parametrize("snippet", GOOD.values(), ids=GOOD)
def test_the_scanner_lets_pass(snippet: str) -> None:
    assert not wrong_derivatives(snippet)


# The front page


def test_the_comparison_is_that_of_the_benchmark() -> None:
    from bench.comparison import written

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "bench" / "results.json").read_text(encoding="utf-8"))
    assert written(readme, results) == readme
    assert len(readme.splitlines()) <= 90


def test_links_of_the_front_page_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", readme):
        assert (ROOT / target).exists(), target
