"""The files of `curvlens reproduce`: pages, numbers and figures, in a folder per effort. Overwrites only own files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.papers import Effort
from curvlens.papers.page_html import html
from curvlens.papers.page_markdown import markdown
from curvlens.papers.reference import compared
from curvlens.papers.shown import Shown
from curvlens.report.drawing import draw, fingerprint
from curvlens.study import Record, Study, table

TABLE = "table.jsonl"
DRAWN = "drawn.json"
"""Fingerprints of the charts and of the figures drawn from them."""
PAGES = ("index.html", "verdicts.md", "summary.json")
LARGEST = 256 << 20
"""Largest size of a figure or of the list of figures, in bytes."""
FIX = "Move it away, or give another folder with --results."


class Pages:
    """The files of an effort in a folder of results."""

    def __init__(self, study: Study, effort: Effort) -> None:
        self._study, self._effort = study, effort
        self._folder = study.folder / effort.name
        self._figures = self._folder / "figures"

    def check(self) -> None:
        """Raise an error if a file of ours cannot be written, before anything long is computed."""
        nearest = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        if not nearest.is_dir():
            raise CurvlensError(f"{str(nearest)!r} is a file; --results is a folder.")
        if not os.access(nearest, os.W_OK):
            raise CurvlensError(f"{str(nearest)!r} cannot be written to. Copy it, or give another folder by --results.")
        for file in (self._study.folder / TABLE, self._figures / DRAWN, *(self._folder / name for name in PAGES)):
            files.require_ours(file, FIX)

    def write(self, shown: Sequence[Shown], records: Mapping[str, Record]) -> list[Path]:
        """Write all files. Returns the tables and pages."""
        pictures = {name: text[text.index("<svg") :] for name, text in self._draw(shown)}
        pages = {
            self._study.folder / TABLE: table(records),
            self._folder / "summary.json": json.dumps(_summary(shown, self._effort), indent=1, ensure_ascii=False)
            + "\n",
            self._folder / "verdicts.md": markdown(shown, self._effort),
            self._folder / "index.html": html(shown, self._effort, pictures),
        }
        return [_write(file, text.encode()) for file, text in pages.items()]

    def _draw(self, shown: Sequence[Shown]) -> Iterator[tuple[str, str]]:
        """Draw all charts that changed. Yields the name and the SVG of every chart."""
        listed = self._figures / DRAWN
        before = _listed(listed)
        now: dict[str, list[str]] = {}
        for chart in (chart for each in shown for chart in each.report.charts):
            drawn = [self._figures / f"{chart.name}.{kind}" for kind in ("svg", "png")]
            made = fingerprint(chart)
            if before.get(chart.name) != [made, *map(_digest, drawn)]:
                for name, content in draw(chart).items():
                    _write(self._figures / name, content)
            now[chart.name] = [made, *map(_digest, drawn)]
            yield chart.name, files.read(drawn[0], LARGEST).decode()
        _write(listed, json.dumps({"drawn": now}, indent=1).encode())


def _digest(file: Path) -> str:
    return sha256(files.read(file, LARGEST)).hexdigest() if file.is_file() else ""


def _listed(file: Path) -> dict[str, list[str]]:
    """The list of drawn figures; empty if it cannot be read."""
    try:
        found: dict[str, list[str]] = files.parse(files.read(file, LARGEST))["drawn"]
    except (OSError, ValueError, LookupError, TypeError, CurvlensError):
        return {}
    return found if isinstance(found, dict) else {}


def _summary(shown: Sequence[Shown], effort: Effort) -> dict[str, object]:
    """The content of the pages, as numbers and texts."""
    return {"settings": effort.name} | {
        each.experiment.name: {
            "title": each.experiment.title,
            "source": each.experiment.source,
            "points": each.points,
            "numbers": [asdict(number) for number in each.report.numbers],
            "references": [
                asdict(beside.reference) | {"apart": beside.apart, "outcome": beside.outcome}
                for beside in compared(each.report.numbers)
            ],
            "findings": [asdict(finding) for finding in each.report.findings],
            "charts": [asdict(chart) for chart in each.report.charts],
            "laws": [asdict(law) for law in each.report.laws],
            "notes": list(each.report.notes),
        }
        for each in shown
    }


def _write(file: Path, content: bytes) -> Path:
    """Write a whole file, or keep the old one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return files.write(file, content, seal=file.suffix, fix=FIX)
    except OSError as error:
        raise CurvlensError(
            f"{str(file)!r} cannot be written: {error.strerror}. Measured points are kept: `curvlens reproduce "
            "verdicts` writes the pages again."
        ) from error
