"""Results: frozen, printed, saved and loaded without loss; files that are damaged or hostile."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import curvlens as cl
import small
from curvlens.results import ByBlock, Density, Eigs, Result, Solution
from curvlens.results.estimate import not_measured
from spectra import matrix, spectra

A = matrix(spectra()["triples over a bulk"])


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    G = cl.ggn(small.problem())
    return {
        "estimate": cl.trace(A, 40),
        "exact": cl.trace(A, 400),
        "diagonal": cl.diagonal(A, 40),
        "blocks": cl.trace(G, 8, by="block"),
        "eigs": cl.eigs(A, 3, "both"),
        "density": cl.density(A, exact=False, steps=20),
        "single probe": cl.density(A, exact=False, probes=1, steps=20).moment(1),
        "solution": G.solve(small.direction(242), damping=1.0),
        "named": G.solve(G.problem.layout.unflatten(small.direction(242)), damping=1.0),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Result):
        return type(a) is type(b) and same(a._fields(), b._fields())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


NAMES = ("estimate", "exact", "diagonal", "blocks", "eigs", "density", "single probe", "solution", "named")


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    result = results[name]
    path = result.save(tmp_path / "deep" / "er" / "result.v1")
    assert path.name == "result.v1.json"
    assert same(cl.load(path), result)
    assert same(cl.load(tmp_path / "deep" / "er" / "result.v1"), result)
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


@pytest.mark.parametrize("name", NAMES)
def test_printed_and_plain(name: str, results: dict[str, Any]) -> None:
    text = repr(results[name])
    assert text
    assert "tensor(" not in text
    assert max(map(len, text.splitlines())) < 160
    assert json.loads(json.dumps(results[name].to_dict(), allow_nan=False))
    if not isinstance(results[name], ByBlock):
        with pytest.raises(dataclasses.FrozenInstanceError):
            results[name].products = 3


def test_texts(results: dict[str, Any]) -> None:
    assert "±" in str(results["estimate"])
    assert "(exact)" in str(results["exact"])
    assert "6 of 6 converged" in repr(results["eigs"])
    assert f"{results['estimate']:.1f}" == f"{float(results['estimate']):.1f}"
    assert float(cl.eigs(A)) == pytest.approx(3)
    assert "unknown" in str(results["single probe"])
    assert "more …" in repr(cl.eigs(A, 30))
    assert "by block (12)" in repr(results["blocks"])
    assert "4 probes" in repr(results["density"])
    assert "cg, damping 1" in repr(results["solution"])
    for name in ("eigs", "density", "estimate"):
        assert results[name]._repr_html_().startswith("<")


def test_provenance(results: dict[str, Any]) -> None:
    for name in ("eigs", "density", "estimate", "solution"):
        found = results[name].provenance
        assert found["versions"]["torch"] == torch.__version__
        assert found["dtype"] == "float64"
    assert results["solution"].provenance["n_tokens"] == 15
    assert results["density"].provenance["seed"] == 0


def test_numbers_of_eigs(results: dict[str, Any]) -> None:
    eigs: Eigs = results["eigs"]
    assert eigs.condition() == pytest.approx(float(eigs.values.abs().max() / eigs.values.abs().min()))
    torch.testing.assert_close(eigs.gaps(), eigs.values.diff())
    with pytest.raises(cl.CurvlensError, match="no condition number"):
        cl.eigs(torch.zeros(3, 3, dtype=torch.float64)).condition()


def test_kinds() -> None:
    assert {"Estimate", "ByBlock", "Eigs", "Density", "Solution"} <= set(Result.kinds)
    assert issubclass(Density, Result)
    assert issubclass(Solution, Result)


# Arithmetic

NORMS = [cl.frobenius(A, 20, seed=seed) for seed in (0, 0, 1)]
TRACES = [cl.trace(A, 20, seed=seed) for seed in (0, 1)]


def test_sums_of_estimates() -> None:
    one, same_seed, other = NORMS
    errors = [float(e.stderr) for e in NORMS]
    assert float((one + same_seed).stderr) == pytest.approx(errors[0] + errors[1])
    assert float((one - same_seed).stderr) == pytest.approx(errors[0] + errors[1])  # a bound: they are equal
    assert float((one + other).stderr) == pytest.approx((errors[0] ** 2 + errors[2] ** 2) ** 0.5)
    assert min(one.dof, other.dof) <= (one + other).dof <= one.dof + other.dof
    assert float((one + other + same_seed).stderr) == pytest.approx(float((one + other).stderr) + errors[1])
    assert float(sum(NORMS)) == pytest.approx(sum(map(float, NORMS)))
    assert float(2 * one - 1) == pytest.approx(2 * float(one) - 1)
    assert float((one / -4).stderr) == pytest.approx(errors[0] / 4)
    assert float((3 - one).stderr) == errors[0]
    low, high = one.interval()
    assert (2 * one).interval() == pytest.approx((2 * low, 2 * high))
    exact = cl.trace(A, 400)
    assert float((TRACES[0] - exact).stderr) == float(TRACES[0].stderr)
    assert (exact + exact).exact
    unknown = dataclasses.replace(other, provenance={})
    assert float((one + unknown).stderr) == pytest.approx(errors[0] + errors[2])
    with pytest.raises(cl.CurvlensError, match="multiplied by numbers"):
        one * other
    with pytest.raises(cl.CurvlensError, match="Shapes must match"):
        one + cl.diagonal(A, 8)


def test_what_changes_nothing_leaves_the_interval_alone() -> None:
    norm = NORMS[0]
    low, high = norm.interval()
    assert norm.positive
    for same in (norm + 0, -1 * (-norm), 1 * norm, norm / 1):
        assert same.interval() == (low, high)
    assert (-norm).interval() == (-high, -low)
    assert not (norm - 2 * norm).positive  # a difference may be of either sign
    with pytest.raises(cl.CurvlensError, match="divided by 0"):
        norm / 0


def test_blocks_that_share_passes_cost_them_once() -> None:
    G = cl.ggn(small.problem())
    traces = cl.trace(G, 8, by="parameter")
    total = sum(traces.values())
    assert isinstance(total, cl.Estimate)
    assert total.samples == 8
    one, other = (cl.trace(G, 8, by="parameter", seed=seed)["embed.weight"] for seed in (0, 1))
    assert (one + other).samples == 16


def test_a_prefix_is_the_sum_of_its_blocks(results: dict[str, Any]) -> None:
    traces = results["blocks"]
    attention = [name for name in traces if name.startswith("h.0.attn.")]
    assert float(traces["h.0.attn"]) == pytest.approx(sum(float(traces[name]) for name in attention))
    assert float(traces["h.0.attn"].stderr) == pytest.approx(sum(float(traces[name].stderr) for name in attention))
    assert "h.0.attn" not in traces
    with pytest.raises(KeyError, match="do not add up"):
        ByBlock(dict(traces), "Frobenius norm")["h.0.attn"]


# Notebooks


def test_every_result_has_a_page_and_escapes_names(results: dict[str, Any]) -> None:
    for result in results.values():
        assert result._repr_html_().startswith("<")
    assert all("_repr_html_" in dir(kind) for kind in Result.kinds.values())
    page = ByBlock({"<script>": cl.trace(A, 8)}, "<b>", note="<i>")._repr_html_()
    assert "&lt;script&gt;" in page
    assert not {"<script>", "<b>", "<i>"} & set(page.replace(">", "> ").split())


def test_shares_are_numbers_and_the_map_is_there_once() -> None:
    eigs = cl.eigs(cl.hessian(small.problem()), 2)
    shares = list(eigs.mass().values())
    assert all(type(x) is float for share in shares for x in share)
    assert sum(share[0] for share in shares) == pytest.approx(1)
    assert {"blocks", "shapes", "maps"} & set(eigs.to_dict()) == {"blocks"}


def test_a_report_is_saved(tmp_path: Path) -> None:
    report = cl.doctor(small.problem())
    again = cl.load(report.save(tmp_path / "report"))
    assert str(again) == str(report)
    assert again.to_dict() == report.to_dict()


def test_flatten_needs_no_keywords() -> None:
    layout = small.problem().layout
    v = small.direction(layout.size)
    assert torch.equal(layout.flatten(layout.unflatten(v)), v)


def test_what_was_not_measured_is_saved(tmp_path: Path) -> None:
    blocks = ByBlock({"a": cl.trace(A, 8), "b": not_measured()}, "trace", "block", "Not measured: 'b'.")
    again = cl.load(blocks.save(tmp_path / "blocks"))
    assert again.unmeasured == ("b",)
    assert repr(again) == repr(blocks)
    assert again.note == blocks.note


# Files


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(cl.CurvlensError, match="There is no result"):
        cl.load(tmp_path / "nothing")
    with pytest.raises(cl.CurvlensError, match="names no file"):
        cl.load("")


def test_damage_is_noticed(results: dict[str, Any], tmp_path: Path) -> None:
    path = results["eigs"].save(tmp_path / "eigs")
    tensors = path.with_name(json.loads(path.read_text())["tensors"]["file"])
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-9])
    with pytest.raises(cl.CurvlensError, match="cut short"):
        cl.load(path)
    tensors.unlink()
    with pytest.raises(cl.CurvlensError, match="is missing"):
        cl.load(path)
    tensors.write_bytes(whole)
    document = json.loads(path.read_text())
    for change, message in (
        ({"kind": "Pickle"}, "this version of curvlens reads"),
        ({"format": 99}, "in format 99"),
        ({"fields": {}}, "not a complete Eigs"),
        ({"fields": {**document["fields"], "values": {"$tensor": "../../secret"}}}, "not a complete Eigs"),
        ({"fields": {**document["fields"], "values": "x"}}, "expected a tensor"),
        ({"fields": 3}, "it has no fields"),
        ({"tensors": {"file": "../../secret.safetensors", "sha256": ""}}, "not the name of such a file"),
        ({"kind": []}, "this version of curvlens reads"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(cl.CurvlensError, match=message):
            cl.load(path)
    for text in ("", "{", "[]", "null", '{"kind": 3}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(cl.CurvlensError):
            cl.load(path)


def test_nothing_half_written(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = results["estimate"].save(tmp_path / "result").read_text()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(cl.CurvlensError, match="No space left"):
        results["exact"].save(tmp_path / "result")
    assert (tmp_path / "result.json").read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_hostile_names(tmp_path: Path) -> None:
    name = 'a/../b"$tensor"\n<script>'
    blocks = ByBlock({name: cl.trace(A, 8), "$dict": cl.diagonal(A, 8)}, "<b>")
    path = blocks.save(tmp_path / "blocks")
    assert same(cl.load(path), blocks)
    assert len(list(tmp_path.iterdir())) == 2
    lone = ByBlock({"\ud800": cl.trace(A, 8)})
    assert same(cl.load(lone.save(tmp_path / "lone")), lone)


def test_results_are_replaced_as_a_whole(results: dict[str, Any], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"somebody's model")
    results["eigs"].save(tmp_path / "model")
    results["density"].save(tmp_path / "model")
    assert len(list(tmp_path.iterdir())) == 3
    results["estimate"].save(tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    assert weights.read_bytes() == b"somebody's model"
    assert same(cl.load(tmp_path / "model"), results["estimate"])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_unknown_number_makes_an_estimate_unknown(results: dict[str, Any], number: float) -> None:
    for name in ("estimate", "exact"):
        assert not (results[name] * number).status.ok
        assert not (results[name] + number).status.ok


def test_only_results_are_replaced(results: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for foreign in ('{"hidden_size": 64}', "not even JSON", '{"format": 1, "kind": "Eigs"}'):
        config.write_text(foreign)
        with pytest.warns(cl.CurvlensWarning, match="was not written by curvlens, so it is not overwritten"):
            saved = results["estimate"].save(tmp_path / "config")
        assert config.read_text() == foreign
        assert saved.name.startswith("config-")
        assert float(cl.load(saved)) == float(results["estimate"])
    changed = results["estimate"].save(tmp_path / "changed")
    changed.write_text(changed.read_text().replace('"note": ""', '"note": "mine"'))
    with pytest.warns(cl.CurvlensWarning, match="was changed since curvlens wrote it"):
        assert results["estimate"].save(changed).name == "changed-2.json"
    assert '"note": "mine"' in changed.read_text()


def test_results_without_a_seal_are_replaced(results: dict[str, Any], tmp_path: Path) -> None:
    old = results["estimate"].save(tmp_path / "old")
    document = json.loads(old.read_text())
    del document["written by"]
    old.write_text(json.dumps(document | {"format": 1}))
    assert results["estimate"].save(old) == old
    assert "written by" in json.loads(old.read_text())


def test_an_exact_density_and_arrays_are_saved(tmp_path: Path) -> None:
    density = cl.density(A)
    assert same(cl.load(density.save(tmp_path / "density")), density)
    solution = cl.ggn(small.problem()).solve(small.direction(242).numpy(), damping=1.0)
    again = cl.load(solution.save(tmp_path / "solution"))
    assert (again.x == solution.x).all()
    assert isinstance(solution.to_dict()["x"], list)


@pytest.mark.parametrize("path", ["sub/", "", ".", "a/" + "x" * 300, "nul\0", "file/inside"])
def test_paths_that_cannot_be(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(cl.CurvlensError):
        cl.trace(A, 8).save(path)
    with pytest.raises(cl.CurvlensError):
        cl.load(path)
