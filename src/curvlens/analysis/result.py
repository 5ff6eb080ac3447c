"""What `curvlens.analyze` returns: the document, its sentences, and the files it was written to."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.analysis import figures
from curvlens.analysis.page import page
from curvlens.analysis.plan import Plan
from curvlens.errors import CurvlensError, printable

FIX = "Give another folder: out='other'."


@dataclass(frozen=True)
class Analysis:
    """All numbers of an analysis. ``print(analysis)`` has its sentences; the page is ``analysis.folder/index.html``."""

    content: dict[str, Any]
    """Plain numbers with errors, as ``analysis.json`` has them."""
    folder: str
    plan: Plan | None = None

    @property
    def sentences(self) -> list[str]:
        """What the analysis says, one sentence each."""
        return [each["text"] for each in self.content["sentences"]]

    @property
    def page(self) -> Path:
        """Where the page is."""
        return Path(self.folder) / "index.html"

    def __repr__(self) -> str:
        lines = [f"Analysis of {self.content['name']}: {self.page}", *(f"  {text}" for text in self.sentences)]
        return "\n".join(map(printable, lines))

    def table(self) -> list[dict[str, Any]]:
        """A record for each cell: block, layer, role, operator, quantity, value, error, ends of the 95 % interval."""
        blocks = {block["name"]: block for block in self.content["blocks"]}
        return [
            {
                "block": name,
                "layer": blocks[name]["layer"],
                "role": blocks[name]["role"],
                "operator": letter,
                "quantity": quantity,
                "value": cell["value"],
                "stderr": cell.get("stderr"),
                "bound": cell.get("bound"),
                "low": cell["low"],
                "high": cell["high"],
                "samples": cell.get("samples"),
                "exact": cell["exact"],
            }
            for letter, quantities in self.content["cells"].items()
            for quantity, found in quantities.items()
            for name, cell in found.items()
        ]

    def to_pandas(self) -> Any:
        """The `table` as a ``pandas.DataFrame``."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise CurvlensError("to_pandas() needs pandas. Install it: pip install 'curvlens[report]'.") from error
        return pandas.DataFrame(self.table())

    def write(self) -> None:
        """Write ``analysis.json``, ``cells.csv``, ``index.html`` and ``figures/`` into the folder.

        Figures and the charts of the page need ``pip install 'curvlens[report]'``; without it they are left out.
        """
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.write(folder / "analysis.json", json.dumps(self.content, indent=1, default=str), fix="")
            files.write(folder / "cells.csv", _csv(self.table()))
            files.write(folder / "index.html", page(self.content))
            figures.write(self.content, folder / "figures")
        except OSError as error:
            raise CurvlensError(
                f"The page could not be written to {str(folder)!r}: {error.strerror}. What was measured is stored: "
                "make room, and run the same again."
            ) from error


def load_analysis(folder: str | Path) -> Analysis:
    """An analysis that was written before."""
    file = Path(folder) / "analysis.json"
    try:
        content = files.parse(files.read(file, 256 << 20))
    except (OSError, ValueError) as error:
        raise CurvlensError(
            f"{str(folder)!r} is no folder of an analysis: {file.name} cannot be read. Make one: curvlens analyze "
            f"MODEL --data DATA --out {folder}."
        ) from error
    if not isinstance(content, dict) or content.get("schema") != 1:
        raise CurvlensError(f"{str(file)!r} is no analysis that this version reads. Run curvlens analyze again.")
    return Analysis(content, str(folder))


def _csv(table: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    if table:
        writer = csv.DictWriter(out, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return out.getvalue()
