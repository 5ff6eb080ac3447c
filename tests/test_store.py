"""Results on disk: nothing is lost, nothing of others is written over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from curvlens import CurvlensError
from curvlens.cli import app
from curvlens.papers import Effort, Experiment, Report, Store, run
from curvlens.papers.records import HEAD, Record
from curvlens.report.charts import Chart

QUICK = Effort(quick=True)


def record(sigma: float = 0.1) -> Record:
    return Record("fig3a", 1, {"sigma": sigma, "seed": 0}, {"norm": 1 / 3}, 1.5)


@pytest.mark.parametrize("content", [b"my notes", b"\x00\xff", b'{"curvlens results":2}', b'{"curvlens results":1}x'])
def test_a_line_of_others_without_an_end_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    kept = Store(tmp_path)
    kept.file("fig3a").write_bytes(content)
    with pytest.raises(CurvlensError, match="--set-aside"):
        kept.records("fig3a")
    with kept.writing() as writer, pytest.raises(CurvlensError, match="--set-aside"):
        writer.add(record())
    assert kept.file("fig3a").read_bytes() == content


def test_a_last_line_without_its_end_is_a_point(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    with kept.writing() as writer:
        writer.add(record(0.1))
        writer.add(record(0.2))
    whole = kept.file("fig3a").read_bytes()
    kept.file("fig3a").write_bytes(whole[:-1])
    assert len(kept.records("fig3a")) == 2
    with kept.writing() as writer:
        writer.add(record(0.3))
    assert kept.file("fig3a").read_bytes().startswith(whole)
    assert len(kept.records("fig3a")) == 3


def test_what_follows_the_last_line_and_is_no_point_is_damage(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    content = HEAD.encode() + b"a remark"
    kept.file("fig3a").write_bytes(content)
    with kept.writing() as writer, pytest.raises(CurvlensError, match="damaged in line 2"):
        writer.add(record())
    assert kept.file("fig3a").read_bytes() == content


def test_a_file_that_was_moved_away_meanwhile_begins_anew(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    with kept.writing() as writer:
        writer.add(record(0.1))
        kept.file("fig3a").rename(tmp_path / "elsewhere")
        writer.add(record(0.2))
    assert [r.config["sigma"] for r in kept.records("fig3a").values()] == [0.2]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(CurvlensError, match="cannot hold results"), Store(tmp_path / "results").writing():
        pass
    assert (tmp_path / "target").read_text() == "precious"


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


def ended(config: Any) -> dict[str, Any]:
    if config["sigma"] == 2.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": config["sigma"] ** 2}


def test_a_process_that_is_ended_from_outside_is_told(tmp_path: Path) -> None:
    points = [{"sigma": 1.0}, {"sigma": 2.0}, {"sigma": 3.0}]
    toy = Experiment("toy", "", "", lambda effort: points, ended, lambda records: Report())
    with pytest.raises(CurvlensError, match="the same command again, with --jobs 1"):
        run([toy], QUICK, Store(tmp_path), jobs=2)


def test_points_that_can_be_read_are_kept_when_a_file_is_moved_away(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    with kept.writing() as writer:
        for sigma in (0.1, 0.2, 0.3):
            writer.add(record(sigma))
    file = kept.file("fig3a")
    lines = file.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"0.2", b"0.4")  # its key is that of another configuration
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(CurvlensError, match="line 3"):
        kept.records("fig3a")
    (aside,) = kept.set_aside(["fig3a"])
    assert aside.read_bytes() == b"\n".join(lines)
    assert sorted(each.config["sigma"] for each in kept.records("fig3a").values()) == [0.1, 0.3]
    assert file.read_bytes() == b"\n".join([*lines[:2], *lines[3:]])


def test_a_folder_in_the_place_of_a_file_is_moved_away(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.file("fig3a").mkdir(parents=True)
    (aside,) = kept.set_aside(["fig3a"])
    assert aside.is_dir()
    assert kept.records("fig3a") == {}
