"""What every kind of result has, whatever it is: found by introspection, so that a new kind is held to it, too."""

from __future__ import annotations

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

import curvlens as cl
from curvlens.results import Result, Status
from curvlens.results.status import worst

SAVED = Path(__file__).parent / "saved"
SAMPLES = {
    "Amount": "amount",
    "Attribution": "attribution",
    "ByBlock": "blocks-sampled",
    "Convergence": "convergence",
    "DataSize": "data-size",
    "Density": "density-sampled",
    "Eigs": "eigs-converged",
    "Estimate": "estimate-diagonal",
    "Forecast": "forecast",
    "Gain": "gain",
    "Landscape": "landscape",
    "Level": "level",
    "Line": "line",
    "LossLaw": "loss-law",
    "Noise": "noise",
    "Portion": "portion",
    "Power": "power",
    "Profile": "profile",
    "Propagation": "propagation",
    "Report": "report-sick",
    "Row": "row",
    "Scaling": "scaling",
    "Solution": "solution-converged",
    "Stability": "stability",
    "Update": "update",
}
"""One saved result of each kind."""
cl.doctor  # noqa: B018  its report is a kind, too


def sample(kind: str) -> Result:
    assert kind in SAMPLES, f"a new kind of result: save one in tests/results/saved and name it here: {kind}"
    result = cl.load(SAVED / SAMPLES[kind])
    assert type(result).__name__ == kind
    assert isinstance(result, Result)
    return result


KINDS = sorted(Result.kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_status(kind: str) -> None:
    assert type(sample(kind).status) is Status


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_for_notebooks(kind: str) -> None:
    page = sample(kind)._repr_html_()
    assert page.startswith("<")
    assert "tensor(" not in page


@pytest.mark.parametrize("kind", KINDS)
def test_plain_numbers(kind: str) -> None:
    plain = sample(kind).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_table(kind: str) -> None:
    result = sample(kind)
    records = result.table()
    assert records
    assert len({tuple(record) for record in records}) == 1  # the same columns in every row
    for record in records:
        assert all(isinstance(x, (str, int, float, type(None))) for x in record.values())
    frame = result.to_pandas()
    assert list(frame.columns) == list(records[0])
    assert len(frame) == len(records)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    result = sample(kind)
    again = cl.load(result.save(tmp_path / "x"))
    assert type(again) is type(result)
    assert again.to_dict() == result.to_dict()
    assert again.status is result.status


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture(kind: str, tmp_path: Path) -> None:
    sample(kind).plot(tmp_path / "x.svg")
    content = (tmp_path / "x.svg").read_text()
    assert content.startswith("<svg")
    assert "NaN" not in content


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("module", "call"), [("altair", "plot"), ("pandas", "to_pandas")])
def test_without_the_extra(kind: str, module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    result = sample(kind)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(cl.CurvlensError, match=r"Install it: pip install 'curvlens\[report\]'"):
        getattr(result, call)()


# The status itself


def test_the_worst_of_a_whole() -> None:
    assert worst([]) is Status.COMPLETE
    assert worst([Status.SAMPLED, Status.NOT_MEASURED, Status.EXACT]) is Status.NOT_MEASURED
    assert {status for status in Status if status.ok} == {
        Status.EXACT,
        Status.CONVERGED,
        Status.COMPLETE,
        Status.SAMPLED,
    }


def decided_by_text(tree: ast.AST) -> list[str]:
    """Comparisons of a note, a ``why``, or of a status with a text."""

    def is_text(node: ast.AST) -> bool:
        return getattr(node, "attr", getattr(node, "id", None)) in ("note", "why")

    def is_word_for_a_status(nodes: list[ast.expr]) -> bool:
        status = any(getattr(node, "attr", getattr(node, "id", None)) == "status" for node in nodes)
        return status and any(isinstance(getattr(node, "value", None), str) for node in nodes)

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            nodes = [node.left, *node.comparators]
            if any(map(is_text, nodes)) or is_word_for_a_status(nodes):
                found.append(ast.unparse(node))
        elif (
            isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith", "find") and is_text(node.value)
        ):
            found.append(ast.unparse(node))
    return found


def test_no_text_decides() -> None:
    """Nothing compares or searches notes, but for the reader of old files."""
    assert decided_by_text(ast.parse("if e.note.startswith('budget') or e.status == 'x' or 'y' in e.note: pass"))
    for file in Path(cl.__file__).parent.rglob("*.py"):
        found = decided_by_text(ast.parse(file.read_text()))
        assert not found or file.name == "format_one.py", f"{file.name}: {found}"
