"""The papers' figures, tables and claims, measured: one command each, results kept.

An experiment is a file in the folder of its source, `first_paper`, `slides` or `full_block`, and a line of the
`EXPERIMENTS` there; a claim is one of `CLAIMS`: that is all there is to adding one.
"""

from curvlens.errors import CurvlensError, nearest
from curvlens.papers import first_paper, full_block, slides
from curvlens.papers.claims import CLAIMS
from curvlens.papers.experiment import Effort, Experiment, Number, Report, measured, missing, run
from curvlens.papers.verdicts import Claim, Finding

EXPERIMENTS: tuple[Experiment, ...] = (*first_paper.EXPERIMENTS, *slides.EXPERIMENTS, *full_block.EXPERIMENTS)

__all__ = [
    "CLAIMS",
    "EXPERIMENTS",
    "Claim",
    "Effort",
    "Experiment",
    "Finding",
    "Number",
    "Report",
    "measured",
    "missing",
    "named",
    "run",
]


def named(name: str) -> Experiment:
    """The experiment of a name."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise CurvlensError(f"There is no experiment {name!r}. {nearest(name, [e.name for e in EXPERIMENTS])}")
