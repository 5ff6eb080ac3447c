"""The papers' figures, tables and claims, measured: one command each, results kept.

An experiment is a line of `EXPERIMENTS`, a claim one of `CLAIMS`: that is all there is to adding one.
"""

from curvlens.errors import CurvlensError, nearest
from curvlens.experiments.block import BOUNDS, DEPTH, FEEDFORWARD, LAYERNORM, TRAINING
from curvlens.experiments.claims import CLAIMS
from curvlens.experiments.deep import FIG6
from curvlens.experiments.entries import FIG1, FIG4
from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.growth import FIG3A, FIG3B, FIG5
from curvlens.experiments.layer import HEADS, KEYS, MOMENTS_, SINGLE, TEMPERATURE, WEIGHTS
from curvlens.experiments.linear import FIG7, FIG8, TABLE1
from curvlens.experiments.run import measured, missing, run
from curvlens.experiments.slides import GGN_TOP, SCALAR, SINK, SINK_GPT
from curvlens.experiments.store import Record, Store, table
from curvlens.experiments.verdicts import Claim, Finding

EXPERIMENTS: tuple[Experiment, ...] = (
    FIG1,
    FIG3A,
    FIG3B,
    FIG4,
    FIG5,
    FIG6,
    FIG7,
    FIG8,
    TABLE1,
    WEIGHTS,
    MOMENTS_,
    TEMPERATURE,
    SINGLE,
    KEYS,
    HEADS,
    SCALAR,
    GGN_TOP,
    SINK,
    SINK_GPT,
    DEPTH,
    BOUNDS,
    LAYERNORM,
    FEEDFORWARD,
    TRAINING,
)

__all__ = [
    "CLAIMS",
    "EXPERIMENTS",
    "Claim",
    "Effort",
    "Experiment",
    "Finding",
    "Number",
    "Record",
    "Report",
    "Store",
    "measured",
    "missing",
    "named",
    "run",
    "table",
]


def named(name: str) -> Experiment:
    """The experiment of a name."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise CurvlensError(f"There is no experiment {name!r}. {nearest(name, [e.name for e in EXPERIMENTS])}")
