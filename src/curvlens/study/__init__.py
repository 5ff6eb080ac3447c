"""The engine for long work: units keyed by configuration. Each is done once and stored; runs can be resumed."""

from curvlens.study.budget import Budget, parse_budget
from curvlens.study.folder import Study
from curvlens.study.progress import StudyProgress
from curvlens.study.rows import table
from curvlens.study.run import Finished, Measured, run
from curvlens.study.unit import Config, Record, Unit

__all__ = [
    "Budget",
    "Config",
    "Finished",
    "Measured",
    "Record",
    "Study",
    "StudyProgress",
    "Unit",
    "parse_budget",
    "run",
    "table",
]
