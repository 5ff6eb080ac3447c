"""The papers' figures, tables and claims, measured: one command each, results are kept.

To add an experiment, add a file to the folder of its source, `first_paper`, `slides`, `full_block` or `motion`, and a
line to the `EXPERIMENTS` there. To add a claim, add it to `CLAIMS`.
"""

from curvlens.errors import CurvlensError, nearest
from curvlens.papers import first_paper, full_block, motion, slides
from curvlens.papers.claims import CLAIMS
from curvlens.papers.experiment import Effort, Experiment, Number, Report, measured, missing, run
from curvlens.papers.verdicts import Claim, Finding

EXPERIMENTS: tuple[Experiment, ...] = (
    *first_paper.EXPERIMENTS,
    *slides.EXPERIMENTS,
    *full_block.EXPERIMENTS,
    *motion.EXPERIMENTS,
)

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
    """The experiment with this name."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise CurvlensError(f"There is no experiment {name!r}. {nearest(name, [e.name for e in EXPERIMENTS])}")
