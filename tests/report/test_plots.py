"""Pictures of results: what they show, and that they can be written."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens import report
from curvlens.report.plots.frame import BLUE, INK, ORANGE
from curvlens.report.plots.heat import OUTSIDE, ticks
from curvlens.report.profile_page import icicle
from curvlens.results import ByBlock, Estimate, Result
from curvlens.results.estimate import not_measured


def estimate(value: float, error: float = 0.0) -> Estimate:
    number = torch.tensor(value, dtype=torch.float64)
    return Estimate(number, torch.tensor(error, dtype=torch.float64), 8, dof=7)


def values(chart: Any) -> list[dict[str, Any]]:
    """All records of a chart."""
    spec, found = chart.to_dict(), list[dict[str, Any]]()

    def walk(item: Any) -> None:
        if isinstance(item, dict):
            data = item.get("data", {})
            found.extend(data.get("values", []) if isinstance(data, dict) else [])
            for inner in item.values():
                walk(inner)
        elif isinstance(item, list):
            for inner in item:
                walk(inner)

    walk(spec)
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    problem = small.problem()
    H, G = cl.hessian(problem), cl.ggn(problem)
    return {
        "block": cl.trace(G, 8, by="block"),
        "head": cl.frobenius(H, 8, by="head"),
        "layer": cl.trace(H, 8, by="layer"),
        "eigs": cl.eigs(H, 3, "both"),
        "density": cl.density(H),
        "diagonal": cl.diagonal(H, 8),
        "solution": G.solve(problem.gradient(), damping=0.1),
        "profile": cl.profile(problem, samples=4),
    }


NAMES = ("block", "head", "layer", "eigs", "density", "diagonal", "solution", "profile")


@pytest.mark.parametrize("kind", ["svg", "png", "html", "json"])
@pytest.mark.parametrize("name", NAMES)
def test_every_result_can_be_drawn(name: str, kind: str, results: dict[str, Result], tmp_path: Path) -> None:
    if kind in ("png", "html") and name not in ("block", "profile"):
        kind = "svg"
    path = tmp_path / f"{name}.{kind}"
    results[name].plot(path)
    content = path.read_bytes()
    begins = {"svg": b"<svg", "png": b"\x89PNG", "html": b"<!", "json": b"{"}
    assert content.lstrip().lower().startswith(begins[kind].lower())
    if kind == "svg":
        assert b"NaN" not in content
        assert len(content) > 1000


def test_a_heat_map_has_every_block(results: dict[str, Result]) -> None:
    traces = results["block"]
    assert isinstance(traces, ByBlock)
    drawn = {record["name"]: record for record in values(traces.plot())}
    assert set(drawn) == set(traces)
    for name, record in drawn.items():
        assert record["value"] == pytest.approx(float(traces[name]))
        layer = ".".join(name.split(".")[:2]) if name.startswith("h.") else OUTSIDE
        assert record["layer"] == layer


def test_bars_say_that_the_architecture_is_not_known(results: dict[str, Result]) -> None:
    unknown = cl.trace(cl.ggn(small.cells()), 2, by="block").plot().to_dict()
    assert "architecture is not known" in str(unknown["title"])
    named = small.cells(blocks={f"h.{i}.{role}": f"cells.{i}.{role}" for i in range(2) for role in ("n", "sa", "ff")})
    drawn = cl.trace(cl.ggn(named), 2, by="block").plot()
    assert {record["layer"] for record in values(drawn)} == {"h.0", "h.1", OUTSIDE}
    for chart in (drawn, results["layer"].plot()):
        assert "architecture" not in str(chart.to_dict().get("title"))


def test_heads_are_by_role(results: dict[str, Result]) -> None:
    drawn = values(results["head"].plot())
    assert {record["head"] for record in drawn} == {0, 1}
    assert {"attn.q", "attn.o"} <= {record["role"] for record in drawn}


def test_what_is_not_sure_is_marked() -> None:
    blocks = {"h.0.attn.q": estimate(1.0, 0.1), "h.0.attn.k": estimate(1.0, 0.3), "h.1.attn.q": estimate(1.0, 0.9)}
    drawn = ByBlock({**blocks, "h.1.attn.k": not_measured()}, "trace").plot()
    assert {r["name"]: r["mark"] for r in values(drawn)} == {
        "h.0.attn.q": "",
        "h.0.attn.k": "·",
        "h.1.attn.q": "╱",
        "h.1.attn.k": "×",
    }


def test_a_picture_names_its_operator_and_its_marks(results: dict[str, Result]) -> None:
    names = {"block": "trace of G", "layer": "trace of H", "eigs": "eigenvalues of H", "density": "density of H"}
    for name, said in {**names, "diagonal": "diagonal of H"}.items():
        assert said in results[name].plot().to_dict()["title"]["text"]
    unsure = ByBlock({"h.0.attn.q": estimate(1.0, 0.3), "h.1.attn.q": estimate(1.0, 0.9)}, "trace").plot().to_dict()
    assert "dot: error above 25 %" in str(unsure["title"])
    assert "stroke: error above 50 %" in str(unsure["title"])
    assert "title" not in ByBlock({"h.0.attn.q": estimate(1.0), "h.1.attn.q": estimate(2.0)}, "trace").plot().to_dict()
    assert "share of the eigenvalues found" in json.dumps(results["eigs"].plot().to_dict())
    assert "symmetric log" in json.dumps(results["density"].plot().to_dict())


@pytest.mark.parametrize("ends", [(1.0, 1.2), (3.0, 40.0), (1e-9, 1e9), (-2.0, 5.0), (0.0, 1e-7), (1e-300, 1e-290)])
def test_a_legend_has_three_ticks_within_its_range(ends: tuple[float, float]) -> None:
    found = ticks(*ends)
    assert 3 <= len(found) <= 10
    assert found == sorted(set(found))
    size = max(map(abs, ends))
    assert all((-size if ends[0] < 0 else ends[0]) <= tick <= ends[1] for tick in found)


@pytest.mark.parametrize(
    ("numbers", "scale"),
    [((1.0, 100.0), "log"), ((-3.0, 5.0), "symlog"), ((0.0, 5.0), "symlog"), ((0.0, 0.0), "symlog")],
)
def test_colours_by_sign(numbers: tuple[float, float], scale: str, tmp_path: Path) -> None:
    found = ByBlock({f"h.{i}.attn.q": estimate(x) for i, x in enumerate(numbers)}, "trace")
    assert f'"type": "{scale}"' in json.dumps(found.plot(tmp_path / "x.svg").to_dict())
    assert "NaN" not in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize(("operator", "colour"), [("hessian", INK), ("ggn", BLUE), ("functional", ORANGE)])
def test_curves_have_the_colour_of_their_operator(operator: str, colour: str) -> None:
    whole = getattr(cl, operator)(small.problem())["h.0.attn.q"]
    for result in (cl.density(whole), cl.eigs(whole, 2)):
        text = json.dumps(result.plot().to_dict()["hconcat"])
        assert [part for part in (INK, BLUE, ORANGE) if part in text] == [colour]
        assert text.count(colour) >= 3


def test_positive_is_blue_everywhere(results: dict[str, Result], tmp_path: Path) -> None:
    signed = ByBlock({"h.0.attn.q": estimate(-3.0), "h.1.attn.q": estimate(5.0)}, "trace")
    for result in (signed, results["profile"]):
        assert '"reverse": true, "scheme": "blueorange"' in json.dumps(result.plot().to_dict(), sort_keys=True)
    page = icicle(results["profile"])  # type: ignore[arg-type]
    assert "--positive: light-dark(#5b9bd5" in page


def test_the_filter_of_a_profile_reaches_the_icicle_and_the_folded_table(results: dict[str, Result]) -> None:
    page = icicle(results["profile"])  # type: ignore[arg-type]
    assert 'document.dispatchEvent(new CustomEvent("page:filter"' in page
    assert 'document.addEventListener("page:filter"' in page
    assert ".cell.dim {" in page
    assert 'item.closest("section > details")' in page  # opened by a filter: the table is in one
    assert re.search(r'<section id="numbers"[^>]*>\s*<details>', page)


def test_masses_of_eigenvectors(results: dict[str, Result]) -> None:
    shares = results["eigs"].mass()  # type: ignore[attr-defined]
    drawn = values(results["eigs"].plot(what="mass"))
    assert sum(record["share"] for record in drawn) == pytest.approx(6, rel=0.02)
    assert {record["block"] for record in drawn} <= set(shares)


def test_names_of_users_are_shown_as_text(tmp_path: Path) -> None:
    hostile = "h.0.<script>alert(1)</script>\x1b[31m"
    found = ByBlock({hostile: estimate(1.0), "h.1.x": estimate(2.0)}, "trace")
    for kind in ("svg", "html"):
        found.plot(tmp_path / f"x.{kind}")
        text = (tmp_path / f"x.{kind}").read_text()
        assert "<script>alert" not in text
        assert "\x1b" not in text


def test_propagation_curves() -> None:
    from curvlens.profiling import propagation

    found = propagation(small.problem(), samples=4)
    drawn = values(found.plot(quantity="top"))
    assert {record["part"] for record in drawn} == {"hessian", "ggn", "functional"}
    with pytest.raises(cl.CurvlensError, match="expected 'trace'"):
        found.plot(quantity="size")


def test_what_cannot_be_drawn(results: dict[str, Result], tmp_path: Path) -> None:
    with pytest.raises(cl.CurvlensError, match="one number"):
        cl.trace(torch.eye(3, dtype=torch.float64)).plot()
    with pytest.raises(cl.CurvlensError, match=r"has to end in \.svg"):
        results["block"].plot(tmp_path / "x.gif")
    with pytest.raises(cl.CurvlensError, match="no folder"):
        results["block"].plot(tmp_path / "none" / "x.svg")
    with pytest.raises(cl.CurvlensError, match="no picture"):
        report.plot(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "call"), [("altair", "plot"), ("pandas", "to_pandas")])
def test_without_the_extra(module: str, call: str, results: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == module:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(cl.CurvlensError, match=r"pip install 'curvlens\[report\]'"):
        getattr(results["block"], call)()


@pytest.mark.parametrize("name", NAMES)
def test_tables_for_pandas(name: str, results: dict[str, Result]) -> None:
    frame = results[name].to_pandas()
    assert len(frame) == len(results[name].table())
    assert len(frame) > 1


class Sine(nn.Module):
    """A model that no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()  # type: ignore[no-any-return]


def test_a_model_without_layers_has_bars() -> None:
    problem = cl.Problem(Sine().double(), (torch.ones(2, 2).double(), torch.zeros(2, 3)), cl.losses.MSE())
    assert len(values(cl.trace(cl.ggn(problem), by="parameter").plot())) == 2


COMMON = ("constructor", "toString", "hasOwnProperty", "__proto__")
"""Names that every JavaScript object has."""


@pytest.mark.parametrize("pattern", ["{}", "h.0.{}", "{}.0.q"])
def test_names_that_javascript_knows(pattern: str, tmp_path: Path) -> None:
    found = ByBlock({pattern.format(name): estimate(i + 1.0) for i, name in enumerate(COMMON)}, "trace")
    found.plot(tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert all(f">{name}" in text or f".{name}" in text for name in COMMON)
    assert ">=" not in text


def test_the_largest_of_many_bars(tmp_path: Path) -> None:
    chart = ByBlock({f"n{i}": estimate(float((-1) ** i * i)) for i in range(1200)}, "trace").plot(tmp_path / "x.svg")
    drawn = {record["name"] for record in values(chart)}
    assert drawn == {f"n{i}" for i in range(700, 1200)}
    assert "the 500 largest of 1200" in (tmp_path / "x.svg").read_text()
