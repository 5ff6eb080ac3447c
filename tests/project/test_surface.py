"""What users may touch: the exported names, and nothing else in README, docs and examples. Names load when used."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import curvlens as cl
from test_docs import ROOT, blocks, pages

INTERNAL = {
    *("analysis", "batches", "blocks", "checksum", "checkup", "cli", "errors", "files", "interrupts", "linalg"),
    *("memory", "papers", "precision", "problem", "profiling", "report"),
    "surroundings",
}
"""Packages and modules that may change from version to version; so may those whose names begin with an underscore."""
ALLOWED: dict[str, tuple[str, ...]] = {
    "docs/howto/reproduce.md": ("curvlens.papers",),
    "examples/verdicts.py": ("curvlens.papers", "curvlens.report.drawing"),
}
"""Pages about the papers' own measurements, which use what measures them."""
MODULES = {module.name for module in pkgutil.iter_modules(cl.__path__) if not module.name.startswith("_")}
PACKAGES = sorted(name for name in cl.__all__ if isinstance(getattr(cl, name), ModuleType))


def test_every_module_is_public_or_said_to_be_internal() -> None:
    assert MODULES - set(PACKAGES) == INTERNAL, "export it in curvlens/__init__.py, or say here that it is internal"
    assert not set(PACKAGES) & INTERNAL


def test_contributing_says_so() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    said = re.search(r"\*\*Internal\*\* are (.*?)\.\n", text, re.DOTALL)
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == INTERNAL


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for name in cl.__all__ if not isinstance(getattr(cl, name), ModuleType)}
    assert {"doctor", "profile", "propagation"} <= functions
    assert not functions & MODULES


def test_all_names_are_there() -> None:
    assert set(cl.__all__) <= set(dir(cl))
    for package in PACKAGES:
        module = getattr(cl, package)
        assert module.__all__
        for name in module.__all__:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'hessain'"):
        cl.hessain  # noqa: B018
    with pytest.raises(AttributeError):
        import_module("curvlens").__getattr__("linalg")


# What the pages use


def exported(module: ModuleType) -> set[str]:
    """Of a module without a list: what it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    own = {name for name, x in vars(module).items() if getattr(x, "__module__", module.__name__) == module.__name__}
    return {name for name in own if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)}


def is_exported(path: str) -> bool:
    """Whether a dotted path leads from one list of names to the next; behind a class or function all is its own."""
    found: Any = cl
    for name in path.split(".")[1:]:
        if not isinstance(found, ModuleType):
            return True
        if name not in exported(found):
            return False
        found = getattr(found, name)
    return True


def used(source: str) -> set[str]:
    """The dotted paths into curvlens that a source imports or uses."""
    tree, named, found = ast.parse(source), {"cl": "curvlens", "curvlens": "curvlens"}, set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "curvlens":
                    found.add(alias.name)
                    named[alias.asname or "curvlens"] = alias.name if alias.asname else "curvlens"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "curvlens":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                found.add(path)
                named[alias.asname or alias.name] = path
    for node in ast.walk(tree):
        words: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            words.insert(0, inner.attr)
            inner = inner.value
        if words and isinstance(inner, ast.Name) and inner.id in named:
            found.add(".".join([named[inner.id], *words]))
    return found


def sources() -> dict[str, str]:
    """The code of README, docs and examples, by file."""
    code = {page: "".join(block for _, block in blocks(page.read_text(encoding="utf-8"))) for page in pages()}
    code |= {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples").rglob("*.py"))}
    return {file.relative_to(ROOT).as_posix(): text for file, text in code.items()}


@pytest.mark.parametrize("name", sources())
def test_pages_use_exported_names(name: str) -> None:
    foreign = {path for path in used(sources()[name]) if not is_exported(path)}
    assert not {path for path in foreign if not path.startswith(ALLOWED.get(name, ()))}


@pytest.mark.parametrize(
    ("source", "well"),
    [
        ("import curvlens as cl\ncl.hessian(p).dense()", True),
        ("import curvlens as cl\ncl.calculus.losses.cross_entropy_curvature(z)", True),
        ("from curvlens.calculus import attention\nattention.hessian(X)", True),
        ("from curvlens.calculus import attention\nattention.inputs.AttentionInputs", False),
        ("import curvlens as cl\ncl.linalg.solve(H, b)", False),
        ("from curvlens.linalg import solve", False),
        ("import curvlens.operators.graph", False),
        ("from curvlens import problem", False),
        ("import curvlens as lens\nlens.operators.base.Operator", False),
        ("import curvlens as cl\ncl.hesssian", False),
        ("import curvlens as cl\ncl.calculus.losses.Tensor", False),
    ],
)
def test_the_reader_of_pages(source: str, well: bool) -> None:
    assert all(map(is_exported, used(source))) is well


# Loaded when used


def loaded(code: str) -> set[str]:
    """The top-level modules that some code has loaded."""
    ask = "import sys; print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "numpy", "scipy", "pandas", "altair", "matplotlib", "transformers"}
HELP = """
from curvlens.cli import app
try:
    app({arguments})
except SystemExit as end:
    assert not end.code
"""


def test_importing_loads_nothing_heavy() -> None:
    assert not loaded("import curvlens") & HEAVY
    assert not loaded("import curvlens; dir(curvlens); curvlens.__version__") & HEAVY
    assert not loaded("import curvlens; curvlens.CurvlensError") & HEAVY
    assert "torch" in loaded("import curvlens; curvlens.Problem")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["profile", "--help"], ["reproduce", "--help"], ["compare", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert not loaded(HELP.format(arguments=arguments)) & HEAVY
