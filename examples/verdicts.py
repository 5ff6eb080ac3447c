"""The verdict page of the documentation, and its figures, from the stored results of the full run.

python examples/verdicts.py results docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from curvlens.papers import EXPERIMENTS, Effort, measured
from curvlens.papers.page_markdown import markdown
from curvlens.papers.shown import Shown
from curvlens.report.drawing import draw
from curvlens.study import Study

FIGURES = "figures/papers/"


def reported(results: Path) -> list[Shown]:
    """What the points of a full run say, experiment by experiment."""
    found, study = [], Study(results)
    for experiment in EXPERIMENTS:
        records = measured(experiment, Effort(), study)
        if len(records) == len(experiment.points(Effort())):
            found.append(Shown.over(experiment, experiment.report(records), records))
    return found


def main(results: Path, docs: Path) -> None:
    """Write the page and its figures."""
    shown = reported(results)
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    for each in shown:
        for chart in each.report.charts:
            name = f"{chart.name}.svg"
            (docs / FIGURES / name).write_bytes(draw(chart)[name])
    (docs / "verdicts.md").write_text(markdown(shown, Effort(), FIGURES), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
