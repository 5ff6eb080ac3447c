"""Pages of `curvlens reproduce`: drawn again only where needed, never over files of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from curvlens.cli import app
from curvlens.report.charts import Chart


@pytest.mark.parametrize("name", ["table.jsonl", "quick-2-seeds/index.html", "quick-2-seeds/figures/drawn.json"])
def test_pages_of_others_are_told_before_anything_is_measured(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text("precious")
    arguments = ["reproduce", "fig8", "--quick", "--seeds", "2", "--results", str(tmp_path)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 1
    assert "not written by curvlens" in told.output.replace("\n", " ")
    assert (tmp_path / name).read_text() == "precious"
    assert not (tmp_path / "fig8.jsonl").exists()


def test_pages_of_one_effort_leave_those_of_another(tmp_path: Path) -> None:
    for seeds in ("2", "3"):
        arguments = ["reproduce", "fig8", "--quick", "--seeds", seeds, "--results", str(tmp_path), "--jobs", "1"]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    pages = [tmp_path / f"quick-{seeds}-seeds" / "index.html" for seeds in (2, 3)]
    assert all("linear MLP" in page.read_text() for page in pages)
    before = pages[0].read_bytes()
    again = ["reproduce", "verdicts", "--quick", "--seeds", "2", "--results", str(tmp_path)]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert pages[0].read_bytes() == before


def test_only_figures_that_changed_are_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def followed(chart: Chart) -> dict[str, bytes]:
        drawn.append(chart.name)
        return {f"{chart.name}.svg": f"<svg>{chart.title}</svg>".encode(), f"{chart.name}.png": bytes(40)}

    monkeypatch.setattr("curvlens.cli.pages.draw", followed)
    arguments = ["reproduce", "fig8", "table1", "--quick", "--seeds", "2", "--results", str(tmp_path), "--jobs", "1"]
    figures = tmp_path / "quick-2-seeds" / "figures"

    def again() -> list[str]:
        drawn.clear()
        assert CliRunner().invoke(app, arguments).exit_code == 0
        return sorted(drawn)

    everything = again()
    assert {"fig8", "table1"} <= set(everything)
    files = {file.name: file.read_bytes() for file in figures.iterdir()}
    page = (figures.parent / "index.html").read_bytes()
    assert again() == []
    (figures / "table1.svg").unlink()
    assert again() == ["table1"]
    (figures / "drawn.json").unlink()
    assert again() == everything
    (figures / "fig8.png").write_bytes(files["fig8.png"] + b"a remark")
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 1
    assert "was changed since curvlens wrote it" in " ".join(told.output.split())
    assert (figures / "fig8.png").read_bytes().endswith(b"a remark")
    (figures / "fig8.png").unlink()
    assert again() == ["fig8"]
    assert {file.name: file.read_bytes() for file in figures.iterdir()} == files
    assert (figures.parent / "index.html").read_bytes() == page
    monkeypatch.setattr("curvlens.report.drawing.version", lambda name: "another")
    assert again() == everything


def test_a_figure_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "quick-2-seeds" / "figures" / "fig8.svg").mkdir(parents=True)
    told = CliRunner().invoke(app, ["reproduce", "fig8", "--quick", "--seeds", "2", "--results", str(tmp_path)])
    assert told.exit_code == 1
    assert isinstance(told.exception, SystemExit)
    assert "fig8.svg" in told.output.replace("\n", "")
